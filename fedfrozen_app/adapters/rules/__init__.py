"""Aggregation rules for clients' low-rank adapters: one file per rule, chosen by `adapter.rule`."""
