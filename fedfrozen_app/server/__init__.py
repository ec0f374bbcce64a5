"""The server: the base of every strategy, rounds, membership, transport, aggregation, records and hooks."""
