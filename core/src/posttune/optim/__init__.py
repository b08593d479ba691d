"""Optimisers: torch's and those of libraries, and how their state is kept and moved."""
