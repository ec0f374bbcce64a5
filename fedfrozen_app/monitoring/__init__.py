"""Numbers about a running site or server, for Prometheus: read from files, so that no process waits."""
