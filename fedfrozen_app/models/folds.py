"""Names of what rounds add to weights that clients do not train: `fold.ROUND/NAME`.

They go with every order as arrays beside the parameter that they are named after, and have its role. A client
holds those of earlier rounds already; one that comes late is sent all.
"""

FOLD = "fold."


def is_fold(name: str) -> bool:
    return name.startswith(FOLD) and "/" in name


def fold_name(number: int, name: str) -> str:
    """Of what round `number` adds."""
    return f"{FOLD}{number}/{name}"


def round_of(name: str) -> int:
    return int(name.removeprefix(FOLD).partition("/")[0])
