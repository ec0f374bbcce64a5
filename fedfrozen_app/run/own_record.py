"""`objects.json`: the Python objects passed to a run, to identify them when they are missing."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import printable
from fedfrozen_app.core.own_objects import OwnObject, is_here, notes, used_by
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.readers import Damaged, read_object

FILE = "objects.json"


def write_own_record(resolved: Mapping[str, Any], folder: Path) -> None:
    if found := used_by(resolved):
        replace_file(folder / FILE, json.dumps({"version": 1, "objects": notes(found)}, indent=2) + "\n")


def read_own_record(folder: Path) -> list[OwnObject]:
    """Empty for a run without Python objects."""
    content = read_object(folder / FILE)
    if content is None:
        return []
    try:
        found = [OwnObject(**one) for one in content["objects"]]
        if not all(isinstance(value, str) for one in found for value in vars(one).values()):
            raise TypeError("not texts")
    except (KeyError, TypeError) as error:
        raise Damaged(folder / FILE, "it is not what a run writes") from error
    return found


def check_given(run: Path, *, trains: bool) -> None:
    """Check that this process has the objects with which the run was created, by their content; otherwise a
    `UserError` that names the objects to pass again."""
    missing = [one for one in read_own_record(run) if not is_here(one)]
    if not missing:
        return
    place = printable(str(run))
    described = printable(listed([one.described for one in missing]))
    words = printable(", ".join(f"{one.argument}=..." for one in missing))
    again = f"fedfrozen.{'resume' if trains else 'load'}({place!r}, {words})"
    raise UserError(
        f"{place} was made with Python objects that this process does not have, {described}: pass them again "
        f"from Python, {again}{'' if trains else '.model()'}."
    )


def listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def check_local(resolved: Mapping[str, Any], runtime: str) -> None:
    """Raise a `UserError` for a deployed run with objects of this process: sites and the SuperLink run
    installed packages."""
    found = used_by(resolved)
    if found and runtime == "deployed":
        raise UserError(
            f"runtime=deployed cannot use {listed([one.described for one in found])}, which this process "
            "alone has: put methods and models into a package, and name the server's data by dataset.path."
        )
