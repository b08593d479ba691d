"""Running rewards: one after another, in threads, or in processes that can be killed."""
