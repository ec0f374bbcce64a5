"""Survival studies over sites: requests, answers, and the pooled results."""
