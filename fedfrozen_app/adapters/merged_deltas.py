"""Names of merged deltas, which rounds add to weights that clients do not train: `fold.ROUND/NAME`.

They are part of every train request, and have the role of the parameter NAME. A client holds those of earlier
rounds already; one that joins late gets all of them.
"""

FOLD = "fold."  # the name in messages and files


def is_merged_delta(name: str) -> bool:
    return name.startswith(FOLD) and "/" in name


def merged_delta_name(number: int, name: str) -> str:
    """The name of round `number`'s merged delta."""
    return f"{FOLD}{number}/{name}"


def round_of(name: str) -> int:
    return int(name.removeprefix(FOLD).partition("/")[0])
