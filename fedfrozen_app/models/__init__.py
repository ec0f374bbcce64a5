"""Architectures, the table of roles, and tasks."""
