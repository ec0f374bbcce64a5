"""What travels: roles, plans, requests, the ledger, codecs and messages."""
