"""Differential privacy on the client: accounting, noise, and what may leave."""
