"""A client's work: the resident model, the step, and the runners that replay it."""
