"""A capsule: one file from which others run a sweep again and check its claims."""
