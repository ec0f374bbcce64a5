"""Federated training of Transformers with one named plan per round, on Flower."""
