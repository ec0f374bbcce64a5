"""Secure aggregation: masked updates, so that the server learns sums and never one client's update."""
