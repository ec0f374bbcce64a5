"""Metrics of a running site or server for Prometheus, read from files so that no process has to wait."""
