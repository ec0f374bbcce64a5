"""Runtimes with all nodes in this process."""
