"""Federations with something wrong with them that we know of."""

import numpy as np

from fedfrozen_app.census.advice import advise
from fedfrozen_app.census.ask import Ask
from fedfrozen_app.census.merge import merge
from fedfrozen_app.census.records import records_of
from fedfrozen_app.census.site import Rules, released_counts
from fedfrozen_app.data.sources.raw_rows import Rows

SITES = ("north", "south", "west", "east")
CLASSES = ("effusion", "fracture", "normal", "pneumonia")
FLOOR = 10


def pictures(rng, rows: int = 240, classes=CLASSES, level: float = 110.0) -> Rows:
    """A site's pictures of 8 by 8 grey pixels."""
    pixels = np.clip(rng.normal(level, 40, (rows, 8, 8)) + rng.normal(0, 12, (rows, 1, 1)), 0, 255)
    labels = [str(label) for label in rng.choice(classes, rows)]
    content = list(pixels.astype(np.uint8))
    return Rows(content, labels, {}, [f"picture {row}" for row in range(rows)])


def texts(rng, rows: int = 200, words: str = "the patient was seen with fever and pain") -> Rows:
    vocabulary = words.split()
    content = [" ".join(rng.choice(vocabulary, rng.integers(20, 40))) for _ in range(rows)]
    labels = [str(label) for label in rng.choice(["discharge", "referral"], rows)]
    return Rows(content, labels, {}, [f"note {row}" for row in range(rows)])


def told(rows: Rows, task: str = "image", floor: int = FLOOR, classes=(), **more) -> dict:
    return released_counts(Ask("test", **more), records_of(rows, task, None, classes), Rules(floor), {})


def census(by_site: dict[str, Rows], task: str = "image", refused=None, classes=(), floor=FLOOR) -> dict:
    answers = {site: told(rows, task, floor, classes) for site, rows in by_site.items()}
    found = merge(answers, refused or {})
    ask = Ask("test", floor=floor)
    found["asked"] = {"hash": ask.hash, **ask.plain}
    found["advice"] = advise(found)
    return found


def healthy(seed: int = 0) -> dict[str, Rows]:
    rng = np.random.default_rng(seed)
    return {site: pictures(rng) for site in SITES}


def missing_class() -> dict[str, Rows]:
    rng = np.random.default_rng(1)
    return {site: pictures(rng, classes=CLASSES[:3] if site == "west" else CLASSES) for site in SITES}


def swapped_spelling() -> dict[str, Rows]:
    rng = np.random.default_rng(2)
    found = {site: pictures(rng) for site in SITES}
    labels = found["south"].labels
    found["south"].labels = ["Pneumonia" if label == "pneumonia" else label for label in labels]
    labels = found["east"].labels
    found["east"].labels = ["fractrue" if label == "fracture" else label for label in labels]
    return found


def tiny_site() -> dict[str, Rows]:
    rng = np.random.default_rng(3)
    return {site: pictures(rng, rows=20 if site == "east" else 240, classes=CLASSES[2:]) for site in SITES}


def shifted() -> dict[str, Rows]:
    rng = np.random.default_rng(4)
    return {site: pictures(rng, level=45.0 if site == "south" else 110.0) for site in SITES}
