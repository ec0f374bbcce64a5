"""Differential privacy on the client: what is spent, what is noised, and what may leave."""
