"""Client side: one file an algorithm, stating only its difference from plain training."""
