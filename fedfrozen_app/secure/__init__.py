"""Secure aggregation: a round's masks, so that the server learns sums and never one client's update."""
