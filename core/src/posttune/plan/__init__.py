"""How much memory a run will take, told from its configuration alone."""
