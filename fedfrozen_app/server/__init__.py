"""The round: the base of every strategy, the conversation with the nodes, aggregation, records, hooks."""
