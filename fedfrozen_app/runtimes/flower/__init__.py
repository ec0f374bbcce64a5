"""Runtimes with Flower's nodes: its processes, its simulation, a deployed federation."""
