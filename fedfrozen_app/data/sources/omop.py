"""OMOP-CDM, or any database that SQLAlchemy reaches: the rows of a query that the data's owner has written.

The query gives `person_id`, `label`, and `text`; without a text it is made of the other columns, as
"age: 63; sex: F". On a site it is written in `site.yaml`, and only there. Needs SQLAlchemy:
pip install "fedfrozen[omop]".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, Rows, first_line, reads

PERSON, LABEL, TEXT = "person_id", "label", "text"


@reads("classification", "multilabel")
def read_omop(spec: DatasetSpec) -> Found:
    if not spec.query or not spec.query.strip():
        raise UserError(
            "dataset.query is missing: a SELECT that gives person_id, label, and text or other columns."
        )
    names, found = query_rows(str(spec.path), spec.query)
    return Found(*_rows([name.lower() for name in names], found, spec), None, unit=PERSON)


def query_rows(path: str, query: str) -> tuple[list[str], list[list[Any]]]:
    """What a SELECT gives: the columns' names, and the rows."""
    try:
        import sqlalchemy
    except ImportError as error:
        raise UserError('These data need SQLAlchemy: pip install "fedfrozen[omop]".') from error
    try:
        engine = sqlalchemy.create_engine(_address(path))
        with engine.connect() as connection:
            answer = connection.execute(sqlalchemy.text(query))
            names = [str(name) for name in answer.keys()]  # noqa: SIM118
            found = [list(row) for row in answer]
        engine.dispose()
    except (sqlalchemy.exc.SQLAlchemyError, ImportError) as error:
        # Its first line alone: what follows quotes the query and its values.
        raise UserError(
            f"The database could not be asked ({first_line(error)}): correct path or query."
        ) from None
    return names, found


def _address(path: str) -> str:
    """A file is SQLite's, and is only read."""
    if "://" in path:
        return path
    place = Path(path).expanduser()
    if not place.is_file():
        raise UserError(
            f"{place} is no database file: give one, or an address such as postgresql://host/cdm."
        )
    return f"sqlite:///file:{place.resolve()}?mode=ro&uri=true"


def _rows(names: list[str], found: list[list[Any]], spec: DatasetSpec) -> tuple[str, Rows]:
    for needed in (PERSON, LABEL):
        if needed not in names:
            raise UserError(
                f"The query gives no column {needed}: it has {', '.join(names)}. Name one AS {needed}."
            )
    if not found:
        raise UserError("The query gives no rows: widen the cohort.")
    cells = {name: [row[place] for row in found] for place, name in enumerate(names)}
    others = [name for name in names if name not in (PERSON, LABEL, TEXT)]
    several = spec.task == "multilabel"
    if TEXT in cells:
        texts = [_word(value) or None for value in cells[TEXT]]
    else:
        if not others:
            raise UserError("The query gives neither text nor columns to make one of: add some.")
        texts = [
            "; ".join(f"{name}: {_word(cells[name][row])}" for name in others if _word(cells[name][row]))
            or None
            for row in range(len(found))
        ]
    labels = [_labels(value) if several else _word(value) or None for value in cells[LABEL]]
    columns = {
        name: [None if v is None else plain_cell(v) for v in cells[name]] for name in (PERSON, *others)
    }
    origins = [f"row {row} of the query" for row in range(len(found))]
    return "multilabel" if several else "text", Rows(texts, labels, columns, origins)


def _word(value: Any) -> str:
    return "" if value is None else str(value).strip()


def plain_cell(value: Any) -> Any:
    return value if isinstance(value, (int, float, str)) and not isinstance(value, bool) else str(value)


def _labels(value: Any) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in _word(value).split(";") if word.strip()))
