"""Survival analysis from sums: curves, the log-rank test, Cox regression, and scores of predictions."""
