"""`partition=like`: rows dealt so that the clients look like the sites of a census.

A client for each site that reported its classes, in the census's order, with that site's mix of classes, and
sizes in the sites' proportions: as large as the rows there are allow. The mixes are kept, so rows that do not
fit into them go to no client. Classes are matched by name; where the names differ, the most frequent class of
the census is played by the most frequent one of the data, and so on.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.partition_rules import Dealt, whole

NONE = "(none)"


def read_census(path: str | None) -> dict[str, dict[str, float]]:
    """By site, the rows of each class; what a site hides is spread evenly over the classes that it hides."""
    if path is None:
        raise UserError("partition=like needs the census that it is to look like: set partition.census.")
    try:
        sites = json.loads(Path(path).expanduser().read_text("utf-8"))["sites"]
        found = {name: class_rows(site["tables"].get("classes")) for name, site in sites.items()}
        reported = {name: counts for name, counts in found.items() if counts and sum(counts.values())}
    except DAMAGED as error:
        raise UserError(
            f"partition.census={path} cannot be read ({error}): give the census.json of `fedfrozen census`."
        ) from error
    if len(reported) < 2:
        raise UserError(
            f"partition.census={path} has the classes of {counted(len(reported), 'site')}: two are needed."
        )
    return reported


def class_rows(table: Mapping[str, Any] | None) -> dict[str, float]:
    """Of a census's table of classes, with what is hidden spread evenly over what is hidden."""
    if table is None:
        return {}
    hidden = [name for name in table["hidden"] if name != NONE]
    left = table["total"] - sum(table["rows"].values())
    parts = len(hidden) + (NONE in table["hidden"]) + bool(table["others_hidden"])
    rows = {name: float(count) for name, count in table["rows"].items() if name != NONE}
    return rows | dict.fromkeys(hidden, left / max(parts, 1))


def like(
    labels: np.ndarray,
    names: Sequence[str],
    sites: dict[str, dict[str, float]],
    rng: np.random.Generator,
) -> tuple[Dealt, tuple[str, ...]]:
    """Rows of each site's client, what was done in words, and the clients' names."""
    wanted = np.array([[counts.get(name, 0.0) for name in _names(sites)] for counts in sites.values()])
    actors, how = _actors(labels, names, _names(sites), wanted)
    available = np.array([(labels == actor).sum() for actor in actors])
    asked = wanted.sum(axis=0)
    scale = float((available[asked > 0] / asked[asked > 0]).min())
    counts = _scaled(wanted, scale)
    while (counts.sum(axis=0) > available).any():  # rounding up took a row too many
        scale *= 0.995
        counts = _scaled(wanted, scale)
    clients: list[list[np.ndarray]] = [[] for _ in sites]
    for place, actor in enumerate(actors):
        rows = rng.permutation(np.flatnonzero(labels == actor))
        ends = np.cumsum(counts[:, place])
        for client, part in enumerate(np.split(rows[: ends[-1]], ends[:-1])):
            clients[client].append(part)
    dealt = [np.concatenate(parts) for parts in clients]
    left = len(labels) - sum(map(len, dealt))
    note = (
        f"Like the census, {scale:.3g} rows for each of its rows, {how}; {counted(left, 'row')} are nobody's"
    )
    return (dealt, note), tuple(sites)


def _scaled(wanted: np.ndarray, scale: float) -> np.ndarray:
    """Whole rows in the mixes of the sites."""
    sizes = wanted.sum(axis=1)
    return np.array([whole(own / size, int(scale * size)) for own, size in zip(wanted, sizes, strict=True)])


def _names(sites: dict[str, dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for counts in sites.values() for name, count in counts.items() if count))


def _actors(
    labels: np.ndarray, names: Sequence[str], wanted: Sequence[str], table: np.ndarray
) -> tuple[list[int], str]:
    """Which class of the data plays each class of the census."""
    place = {name: number for number, name in enumerate(names)}
    if all(name in place and (labels == place[name]).any() for name in wanted):
        return [place[name] for name in wanted], "classes by name"
    present, sizes = np.unique(labels, return_counts=True)
    if len(present) < len(wanted):
        raise UserError(
            f"The census has {len(wanted)} classes and the train rows have {len(present)}: take a data set "
            "with as many."
        )
    frequent = present[np.argsort(-sizes, kind="stable")]
    order = np.argsort(-table.sum(axis=0), kind="stable")
    actors = [0] * len(wanted)
    for rank, column in enumerate(order):
        actors[column] = int(frequent[rank])
    return actors, "classes by how frequent they are"
