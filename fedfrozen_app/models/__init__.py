"""Model architectures, the table of roles, and tasks."""
