"""Memory: what is where, how much of it, and what to do when there is too little."""
