"""A capsule: one file from which others can rerun a sweep and check its claims."""
