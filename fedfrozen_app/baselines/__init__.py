"""What a plain model has on the rows of a run: it keeps people honest about the larger one."""
