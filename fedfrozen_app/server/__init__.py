"""The round: the base of every strategy, membership and transport, aggregation, records, hooks."""
