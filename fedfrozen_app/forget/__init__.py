"""A client leaves a finished run: the run goes back to before its first round, and on without it."""
