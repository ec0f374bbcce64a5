"""Plain models on the rows of a run, as a baseline for the larger one."""
