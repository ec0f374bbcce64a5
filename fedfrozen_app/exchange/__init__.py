"""The exchange between server and clients: roles, plans, requests, the ledger, codecs and messages."""
