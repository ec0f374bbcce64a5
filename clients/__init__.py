"""Client side: one file per algorithm, with only its difference from plain training."""
