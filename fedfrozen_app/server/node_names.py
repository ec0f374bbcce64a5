"""Names of nodes: each belongs to the key of the certificate under which the server registered it."""

from collections.abc import Mapping


def problem_of_name(node: int, name: str, sites: Mapping[int, str]) -> str | None:
    """Why this node may not use this name. `sites`: the registered names by node; empty in a simulation.

    A node registered after the run was submitted is not in the list: it may have a new name. A site with a
    new key is a new node: it takes part again after the run is resumed, which reads the list again.
    """
    if node in sites:
        own = sites[node]
        return None if name == own else f"it calls itself {name}, and is registered as {own}"
    if name in sites.values():
        return f"it calls itself {name}, and another node is registered as {name}"
    return None
