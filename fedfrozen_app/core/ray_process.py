"""Whether this process uses Ray: of Flower's simulation, or of `runtime=ray`."""

import sys


def simulated() -> bool:
    """True where Ray runs the clients, and one person owns both the run and the data."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
