"""Runtimes: clients in this process, in Flower's simulation, on Ray actors, or on real sites."""
