"""Forget a client of a finished run: restart before its first round and continue without it."""
