"""Local training: the worker model, the training step, and the runners that replay it."""
