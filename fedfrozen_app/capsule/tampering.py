"""Checks a capsule's statements against its own raw rows, its wheel, and the local data."""

from collections.abc import Iterable
from pathlib import Path

from fedfrozen_app.capsule.claims import claims_of, wrong_claims
from fedfrozen_app.capsule.environment import sources_of_wheel
from fedfrozen_app.capsule.opened import Capsule
from fedfrozen_app.capsule.places import Place, files_of
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.strict import hash_of
from fedfrozen_app.files.readers import read_object
from fedfrozen_app.files.rows import metric_name, read_rows
from fedfrozen_app.report.compare.collect import collect
from fedfrozen_app.report.compare.tables import to_csv


def inner_problems(capsule: Capsule) -> list[str]:
    """Contradictions between the files of a capsule whose digests all match."""
    problems = []
    code, record = capsule.record["code"], capsule.record
    wheel = capsule.folder / str(code.get("wheel"))
    if wheel.name not in record["files"] or sources_of_wheel(wheel) != code.get("sources"):
        problems.append(f"{wheel.name} is not the code of the stated bundle hash")
    for name, cell in capsule.cells.items():
        summary, rows = read_object(capsule.run(name) / "summary.json") or {}, read_rows(capsule.run(name))
        if hash_of(summary.get("config")) != cell["configuration"] or summary.get("seed") != cell["seed"]:
            problems.append(f"runs/{name}/summary.json holds another configuration than stated")
        key = f"test_{metric_name(rows)}"
        final = [row[key] for row in rows if key in row][-1:]
        if [summary.get(f"final_{key}")] != final:
            problems.append(f"runs/{name}: the final result does not follow from its raw rows")
    if problems:
        return problems
    comparison = collect([capsule.folder / "runs"])
    rows_of = {name: cell["test_rows"] for name, cell in capsule.cells.items()}
    problems += wrong_claims(record["claims"], claims_of(comparison, rows_of))
    if to_csv(comparison).encode() != (capsule.folder / "comparison.csv").read_bytes():
        problems.append("comparison.csv does not follow from the raw rows")
    return problems


def find_places(
    capsule: Capsule, cells: Iterable[str], given: list[Path]
) -> tuple[dict[str, Path], list[str]]:
    """Locate the data of these cells by digest, by placeholder; also the differing file of near matches."""
    needed = dict.fromkeys(name for cell in cells for name in capsule.cells[cell]["places"])
    here = {path: Place(path.name, files_of(path)) for path in given}
    found: dict[str, Path] = {}
    problems, missing = [], []
    for name in needed:
        stated = capsule.place(str(name))
        fitting = [path for path, place in here.items() if place.digest == stated.digest]
        alike = [path for path in here if path.name == stated.name]
        if fitting:
            found[str(name)] = fitting[0].resolve()
        elif alike:
            problems.append(
                f"the data in {alike[0]} are not those of the capsule: {stated.differs(here[alike[0]])}"
            )
        else:
            missing.append(stated.shown)
    if missing:
        raise UserError(f"The cells read {', '.join(missing)}: give them with --data PATH.")
    return found, problems
