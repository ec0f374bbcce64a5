"""Utilities for all packages: errors, seeds, digests, the registry, the verb table, logs."""
