"""The order of clients wherever it matters: partition numbers by value, site names by the alphabet."""


def natural_order(name: str) -> tuple[int, int | str]:
    return (0, int(name)) if name.isdecimal() else (1, name)
