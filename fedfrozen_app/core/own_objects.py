"""Python objects that a run was given in place of names, and how processes of the same machine get them.

`fedfrozen.run(dataset=frame, model=net, strategy=Mine)` registers each object under a name that ends with its
content, and notes here what it is. A run keeps these notes (`objects.json`), never the objects.

The processes of a Flower simulation and of parallel sweeps get the objects themselves, through a private file
that exists as long as they do, and whose place only their parent's environment names. Nothing from
a run folder, a configuration or a network is ever unpickled.
"""

import hashlib
import os
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import RunFailed, UserError

PLACE, DIGEST = "FEDFROZEN_OBJECTS", "FEDFROZEN_OBJECTS_SHA256"
SHOWN = 8  # hexadecimal digits of a content in a name
OURS = {"fedfrozen", "fedfrozen_app", "strategies", "clients"}


@dataclass(frozen=True)
class OwnObject:
    """What an object was, for the record."""

    argument: str  # the keyword of fedfrozen.run: dataset, model, strategy, algorithm
    group: str  # of the registry
    name: str  # in the registry: the word and the content's first digits
    word: str  # for people: own_dataset, or the class's name
    what: str  # "a pandas DataFrame of 80 rows"
    digest: str  # SHA-256 of its content

    @property
    def is_class(self) -> bool:
        return self.group in ("strategies", "algorithms")

    @property
    def described(self) -> str:
        return f"{self.argument} ({self.what}, content {self.digest[:SHOWN]})"


KNOWN: dict[tuple[str, str], OwnObject] = {}
NAMES: dict[type, str] = {}  # of classes, also of equal ones under one name


def keep(argument: str, group: str, word: str, what: str, digest: str, thing: Any) -> str:
    """Register `thing`, and return its name: the same for the same content, in every process."""
    name = f"{word}_{digest[:SHOWN]}"
    if isinstance(thing, type):
        NAMES[thing] = name
    if (group, name) not in KNOWN:
        KNOWN[group, name] = OwnObject(argument, group, name, word, what, digest)
        registry.register(group, name, thing)
    return name


def name_of(thing: type) -> str:
    """The name that a class was registered under."""
    if thing not in NAMES:
        raise UserError(
            f"The class {thing.__name__} has no name here: give it to fedfrozen.run, or offer it in a "
            "package and use its name."
        )
    return NAMES[thing]


def used_by(resolved: Mapping[str, Any]) -> list[OwnObject]:
    """The objects that a configuration names."""
    places = (
        ("dataset", "kind", "datasets"),
        ("model", "source", "models"),
        ("strategy", "name", "strategies"),
    )
    names = [(group, str((resolved.get(section) or {}).get(key))) for section, key, group in places]
    return [KNOWN[one] for one in names if one in KNOWN]


def is_here(one: OwnObject) -> bool:
    """Whether this process has the object, by its content."""
    known = KNOWN.get((one.group, one.name))
    return known is not None and known.digest == one.digest


def notes(found: Iterable[OwnObject]) -> list[dict[str, str]]:
    return [asdict(one) for one in found]


def is_own(module: str) -> bool:
    """Whether a module is the user's: neither ours, nor Python's, nor an installed package's."""
    if module.partition(".")[0] in OURS | sys.stdlib_module_names - {"__main__"}:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or file is None:
        return True
    installed = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    return not any(Path(file).resolve().is_relative_to(Path(place).resolve()) for place in installed)


# Child processes ------------------------------------------------------------------------------------------


@contextmanager
def handed_down(resolved: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Child processes that begin within get the objects that this configuration names, or without one all of
    this process, by `take_over`."""
    named = KNOWN.values() if resolved is None else used_by(resolved)
    if not named or PLACE in os.environ:
        yield
        return
    content = packed({(one.group, one.name) for one in KNOWN.values() if one in named or one.is_class})
    with tempfile.TemporaryDirectory(prefix="fedfrozen-objects-") as folder:  # for this account alone
        path = Path(folder) / "objects"
        path.write_bytes(content)
        os.environ |= {PLACE: str(path), DIGEST: hashlib.sha256(content).hexdigest()}
        try:
            yield
        finally:
            del os.environ[PLACE], os.environ[DIGEST]


def packed(keys: Collection[tuple[str, str]]) -> bytes:
    """Classes of a script or a notebook by value; those of modules by name, with where these are found."""
    from ray import cloudpickle  # lazy: takes a second

    known = {key: KNOWN[key] for key in KNOWN if key in keys}
    things = {key: registry.REGISTERED[key] for key in known}
    try:
        objects = cloudpickle.dumps((known, things, NAMES))
    except (TypeError, AttributeError, ValueError, RecursionError) as error:
        raise UserError(
            f"What was given as a Python object cannot be handed to other processes ({error}): use "
            "runtime=inprocess, or put it into a package."
        ) from error
    return cloudpickle.dumps(([str(Path(place).resolve()) for place in sys.path], objects))


def take_over() -> None:
    """In a child process: register the objects that its parent handed down, once."""
    place = os.environ.get(PLACE)
    if place is None or KNOWN:
        return
    from ray import cloudpickle

    try:
        content = Path(place).read_bytes()
    except OSError as error:
        raise RunFailed(
            f"The Python objects of this run are not on this machine ({error.strerror})."
        ) from error
    if hashlib.sha256(content).hexdigest() != os.environ.get(DIGEST):
        raise RunFailed("The Python objects of this run are not as they were handed down.")
    places, objects = cloudpickle.loads(content)  # our parent's, of this very run
    sys.path.extend(place for place in places if place not in sys.path)
    known, things, names = cloudpickle.loads(objects)
    for (group, name), thing in things.items():
        registry.register(group, name, thing)
    NAMES.update(names)
    KNOWN.update(known)
