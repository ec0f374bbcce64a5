"""Clients on Ray actors, each of which trains a part of a round."""
