"""From finished runs to a capsule: read, check, describe, pack."""

import hashlib
import json
import math
import shlex
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fedfrozen_app
from fedfrozen_app.capsule import crate, environment
from fedfrozen_app.capsule.claims import claims_of
from fedfrozen_app.capsule.crate import About
from fedfrozen_app.capsule.places import Place, files_of, placeholder, places_of, portable, portable_words
from fedfrozen_app.capsule.splits import digests_of
from fedfrozen_app.core.digests import digests
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.exchange.strict import hash_of
from fedfrozen_app.files.disk import whole_file
from fedfrozen_app.files.readers import read_arrays, read_checked
from fedfrozen_app.launch import config_of_run, finished
from fedfrozen_app.report.compare.collect import collect
from fedfrozen_app.report.compare.model import Comparison
from fedfrozen_app.report.compare.tables import to_csv, to_markdown

FORMAT = 1
CAPSULE, LOCK = "capsule.json", "requirements.txt"
SEAL = "sha256"
KEPT = ("data.json", "clients.json", "tokenizer.json", "table.json")  # besides summary and rows
NOTHING: Mapping[str, bytes] = {}
EARLIEST = (1980, 1, 1, 0, 0, 0)  # of every entry, so that the same runs give the same bytes


@dataclass
class Made:
    """The parts of a capsule in progress."""

    files: dict[str, bytes] = field(default_factory=dict)
    cells: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)  # by placeholder
    corpora: dict[str, Corpus] = field(default_factory=dict)  # read once for all runs of one dataset


def write_capsule(
    folder: Path, out: Path, about: About, *, more: Mapping[str, bytes] = NOTHING, trusted: bool = False
) -> str:
    """Write the capsule and return its digest. `more`: further files by name, such as a page and its rows."""
    comparison = collect([folder])
    made = Made(dict(more))
    runs = [run.folder for group in comparison.groups for run in group.runs]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise UserError(f"Two runs below {folder} have folders of the same name: give a folder of one sweep.")
    for run in runs:
        add_run(made, run, trusted=trusted)
    comparison = comparison_of(made.files, comparison)
    with tempfile.TemporaryDirectory(prefix="capsule") as work:
        wheel = environment.build_wheel(Path(work))
        made.files[wheel.name] = wheel.read_bytes()
        code = {"wheel": wheel.name, "sources": environment.sources_of_wheel(wheel)}
    made.files[LOCK] = environment.lock_text().encode()
    add_table(made, comparison)
    add_papers(made, about)
    record = {
        "format": FORMAT,
        "title": about.title,
        "code": code,
        "machine": environment.machine(),
        "places": {name: {"name": place.name, "files": place.files} for name, place in made.places.items()},
        "cells": made.cells,
        "claims": claims_of(comparison, {name: cell["test_rows"] for name, cell in made.cells.items()}),
        "left_out": {path.name: why for path, why in comparison.left_out},
    }
    return pack(made, record, out, about)


def comparison_of(files: Mapping[str, bytes], original: Comparison) -> Comparison:
    """The comparison of the runs as stored in the capsule: a reader can compute the table only from these,
    and the order of their settings, which labels and rows follow, differs from the originals'."""
    with tempfile.TemporaryDirectory(prefix="capsule") as work:
        for name, content in files.items():
            if name.startswith("runs/"):
                path = Path(work, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        return replace(collect([Path(work, "runs")]), left_out=original.left_out)


def add_run(made: Made, run: Path, *, trusted: bool) -> None:
    summary = finished(run)
    had = summary["config"]
    if summary.get("objects"):
        raise UserError(f"{run} was made with Python objects, which no file holds: put them into a package.")
    if had["runtime"]["name"] == "deployed":
        raise UserError(f"{run} ran over real sites, which nobody else can run again: give simulated runs.")
    places = places_of(had)
    names = {str(path): placeholder(key, path) for key, path in places.items()}
    names = dict(sorted(names.items(), key=lambda pair: -len(pair[0])))  # the longest path first
    for path, name in names.items():
        if name not in made.places:
            made.places[name] = Place(Path(path).name, files_of(Path(path)))
    words = shlex.split(summary["command"])[1:]
    kept = portable_words(words, names)
    shown = portable(summary, names) | {"command": shlex.join(["fedfrozen", *kept])}
    for key in ("output_dir", "run_id"):
        shown["config"][key] = None
    prefix = f"runs/{run.name}"
    made.files[f"{prefix}/summary.json"] = _json(shown)
    for name in ("metrics.jsonl", *KEPT):
        if (found := _content(run / name)) is not None:
            made.files[f"{prefix}/{name}"] = _portable_text(found, names)
    config = config_of_run(run, summary, [], trusted=trusted)
    key = hash_of([had["dataset"], had.get("num_clients") if had["partition"]["name"] == "natural" else None])
    corpus = made.corpora.setdefault(key, made.corpora.get(key) or load_corpus(config))
    shares = share_out(corpus, config, config.num_clients)
    made.cells[run.name] = {
        "seed": summary["seed"],
        "overrides": kept,
        "configuration": hash_of(shown["config"]),
        "places": sorted(names.values()),
        "splits": digests_of(corpus, shares),
        "test_rows": len(corpus.test),
        "model": hash_of(digests(read_arrays(run / "model.safetensors")[0])),
        "seconds": summary["seconds"],
    }


def _content(path: Path) -> bytes | None:
    if path.name == "metrics.jsonl":
        return path.read_bytes()
    found = read_checked(path)
    return None if found is None else found.content


def _portable_text(content: bytes, names: Mapping[str, str]) -> bytes:
    text = content.decode("utf-8")
    for path, name in names.items():
        text = text.replace(json.dumps(path)[1:-1], name)
    return text.encode()


def add_table(made: Made, comparison: Comparison) -> None:
    made.files["comparison.csv"] = to_csv(comparison).encode()
    made.files["comparison.md"] = to_markdown(comparison).encode()


def add_papers(made: Made, about: About) -> None:
    """Add licence and citation from the checkout; for an installed package, a short citation."""
    root = Path(fedfrozen_app.__file__).parents[1]
    if (root / "LICENSE").is_file() and (root / "pyproject.toml").is_file():
        made.files["LICENSE"] = (root / "LICENSE").read_bytes()
    citation = [
        "cff-version: 1.2.0",
        'message: "Please cite these results, and the paper of the method (`fedfrozen methods` names it)."',
        "type: dataset",
        f"title: {json.dumps(about.title)}",
        f"authors: [{{name: {json.dumps(about.author)}}}]",
        f"license: {about.licence}",
        f"date-released: {about.published[:10]}",
    ]
    made.files["CITATION.cff"] = "".join(f"{line}\n" for line in citation).encode()


def pack(made: Made, record: dict[str, Any], out: Path, about: About) -> str:
    """Write the zip file: capsule.json names every other file by its digest."""
    commands = {name: shlex.join(["fedfrozen", *cell["overrides"]]) for name, cell in made.cells.items()}
    sizes = {name: len(content) for name, content in made.files.items()}
    # capsule.json holds the crate's digest, so the crate cannot state the size of capsule.json.
    described = crate.metadata(about, {**sizes, CAPSULE: 0}, record["code"]["wheel"], commands)
    described["@graph"] = [
        {key: value for key, value in one.items() if (one["@id"], key) != (CAPSULE, "contentSize")}
        for one in described["@graph"]
    ]
    files = {**made.files, crate.NAME: _json(described)}
    record = finite({**record, "files": {name: _sha256(content) for name, content in sorted(files.items())}})
    record[SEAL] = hash_of(record)
    files[CAPSULE] = _json(record)
    with whole_file(out) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in _in_order(files):
            info = zipfile.ZipInfo(name, EARLIEST)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            packed.writestr(info, content)
    return record[SEAL]


def _in_order(files: Mapping[str, bytes]) -> Sequence[tuple[str, bytes]]:
    first = (crate.NAME, CAPSULE)
    return [(name, files[name]) for name in (*first, *sorted(set(files) - {*first}))]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _json(value: Any) -> bytes:
    return (json.dumps(finite(value), indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, (list, tuple)) else value


def today() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
