"""Attacks on a finished run: what an adversary can really tell, beside what epsilon promises."""
