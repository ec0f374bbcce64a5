"""Whether this process belongs to Flower's Ray simulation."""

import sys


def simulated() -> bool:
    """True in a process of Flower's simulation, where one person owns both the run and the data."""
    ray = sys.modules.get("ray")  # Flower imports Ray there, and nowhere else
    return ray is not None and ray.is_initialized()
