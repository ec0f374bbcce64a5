"""A client's work: the worker model, the step, and the runners that replay it."""
