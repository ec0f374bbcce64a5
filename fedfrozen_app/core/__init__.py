"""What every other room may use: errors, seeds, digests, the registry, the verb table, logs."""
