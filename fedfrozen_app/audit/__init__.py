"""Attacks on a finished run: what an adversary can infer in practice, compared with epsilon's guarantee."""
