"""Names of merged deltas, which rounds add to weights that clients do not train: `fold.ROUND/NAME`.

They are sent with every train request as arrays beside the parameter that they are named after, and have its
role. A client holds those of earlier rounds already; one that joins late is sent all of them.
"""

FOLD = "fold."  # the name in messages and files


def is_merged_delta(name: str) -> bool:
    return name.startswith(FOLD) and "/" in name


def merged_delta_name(number: int, name: str) -> str:
    """Of what round `number` adds."""
    return f"{FOLD}{number}/{name}"


def round_of(name: str) -> int:
    return int(name.removeprefix(FOLD).partition("/")[0])
