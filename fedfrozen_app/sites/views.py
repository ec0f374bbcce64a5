"""A site's views: what of its data a run may train on, written by the site's steward in `site.yaml`.

    views:
      notes-2024: {kind: parquet, path: notes.parquet, text_column: text, label_column: icd, classes: [...],
                   unit: patient, unit_column: patient_id}

A run names a view. It cannot change the rows, columns or classes of the view, nor the unit of privacy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fedfrozen_app.config import DatasetConfig, setting
from fedfrozen_app.config.strict_values import read_strict
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.proposal import NAME
from fedfrozen_app.exchange.table_part import TablePart
from fedfrozen_app.tasks.table_targets import survival_model, task_of
from fedfrozen_app.tasks.target import target_of

ROUNDED_TO = 10  # rows, where a view declares no number
RENEW = (
    "{path} describes its data under `data:`, as kits did before views: write `views: {{main: {{{data}, "
    "classes: [THOSE OF ALL SITES]}}}}` in its place; keys, audit log, budget and state stay as they are."
)


@dataclass(frozen=True)
class View:
    name: str = setting("", "")
    kind: str = setting("", "")
    path: str | None = None
    classes: tuple[str, ...] | None = None  # of all sites; a run cannot use a view without them
    unit: str = setting("example", "", choices=("example", "document", "patient"))
    unit_column: str | None = None
    examples: int | None = setting(None, "", least=1)  # sent to the server instead of the true number
    task: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    image_column: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    prompt_column: str | None = None  # for language models, with the three below
    answer_column: str | None = None
    separator: str | None = None
    prompt_loss: bool = False
    unmarked: str = setting("files", "", choices=("sentences", "files"))  # the default of earlier versions
    keep_classes: tuple[str, ...] | None = None
    top_labels: int | None = setting(None, "", least=2)
    limit: int | None = setting(None, "", least=1)
    image_size: int | None = setting(None, "", least=1)
    channels: int | None = None
    max_tokens: int | None = setting(None, "", least=2)  # a run must read the same lengths
    test_fraction: float = setting(0.2, "", above=0, most=0.9)
    client_validation: float = setting(0.1, "", least=0, most=0.9)
    split_seed: int = setting(0, "", least=0)
    window: tuple[float, ...] | None = None  # for DICOM and NIfTI: centre and width
    slices: int | None = setting(None, "", least=1)
    query: str | None = None  # for a database: the cohort as SQL, written at this site
    columns: tuple[str, ...] | None = None  # of a table: those that runs may read; none can without them
    missing: str = setting("median", "", choices=("median", "drop"))
    time_column: str | None = None  # for survival, with event_column
    event_column: str | None = None

    @property
    def column(self) -> str | None:
        """The column with the unit of a row (person, document); None if every row is its own unit."""
        return None if self.unit == "example" else self.unit_column or self.unit

    def dataset(self) -> DatasetConfig:
        """The dataset configuration; nothing in it comes from the server."""
        names = {one.name for one in fields(DatasetConfig)} & {one.name for one in fields(View)}
        return DatasetConfig(**{name: getattr(self, name) for name in names}, validation=0.0)

    @property
    def has_classes(self) -> bool:
        """Whether its rows have classes that all sites must have agreed on: regression and survival have
        none."""
        return self.kind != "table" or target_of(task_of(self.dataset())).has_classes

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Of a table, what a run is to predict."""
        return tuple(name for name in (self.label_column, self.time_column, self.event_column) if name)

    def problem_of_table(self, part: TablePart | None) -> str | None:
        """Why a run that reads this table, or none, does not fit the view."""
        if (part is not None) != (self.kind == "table"):
            return f"the run reads {'no' if part is None else 'a'} table, and the view {self.name} is" + (
                " one" if part is None else " none"
            )
        if part is None:
            return None
        if self.columns is None:
            return f"the view {self.name} does not say its columns, so that no run can be held against them"
        own = task_of(replace(self.dataset(), survival_model=survival_model(part.task)))
        if part.task != own:
            return f"the run predicts a target of the kind {part.task}, and the view {self.name} has {own}"
        if strange := sorted(set(part.columns) - set(self.columns)):
            return f"the run reads the column {strange[0]}, which the view {self.name} does not have"
        return None

    def fits(self, classes: tuple[str, ...]) -> bool:
        """Whether these are the view's classes; for entities, types or tags."""
        return set(classes) in (set(self.classes or ()), set(self.tags))

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of words, if the classes are types of entities."""
        return ("O", *(f"{place}-{kind}" for kind in self.classes or () for place in "BI"))

    def public_count(self, count: int) -> int:
        """The number that leaves the site instead of its true number of rows or units."""
        return self.examples or rounded(count)


def rounded(count: int) -> int:
    """To tens, and no fewer than ten."""
    return max(ROUNDED_TO, round(count / ROUNDED_TO) * ROUNDED_TO)


def read_views(found: Mapping[str, Any], path: Path) -> dict[str, View]:
    """The views of a `site.yaml`; `UserError` if they cannot be read."""
    if "data" in found:
        data = found["data"] if isinstance(found["data"], dict) else {}
        shown = ", ".join(f"{key}: {value}" for key, value in data.items())
        raise UserError(RENEW.format(path=path, data=shown or "kind: images, path: data"))
    given = found.get("views")
    if not isinstance(given, dict) or not given:
        raise UserError(f"{path} must say views: by name, what of the site's data a run may train on.")
    return {name: _read_view(name, entry, path) for name, entry in given.items()}


def _read_view(name: Any, given: Any, path: Path) -> View:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UserError(f"{path}: {name!r} is no name of a view: use letters, digits, - _ and .")
    where = f"{path}: the view {name}"
    kinds = registry.names("datasets")
    if not isinstance(given, dict) or given.get("kind") not in kinds:
        raise UserError(f"{where} must say its kind: {', '.join(kinds)}.")
    known = {one.name for one in fields(View)} - {"name"}
    if unknown := sorted(str(key) for key in set(given) - known):
        raise UserError(f"{where} has the unknown key {unknown[0]}: use {', '.join(sorted(known))}.")
    if isinstance(given.get("classes"), list):  # YAML reads 0 and yes as numbers and booleans
        given = given | {"classes": [str(item) for item in given["classes"]]}
    try:
        view = read_strict(View, given, without=("name",))
    except ValueError as error:
        raise UserError(f"{where}: {error}.") from error
    if view.unit == "document" and view.unmarked != "files":
        raise UserError(
            f"{where} is per document: leave out unmarked, which would make a document of every sentence."
        )
    folder = path.parent
    elsewhere = view.path is None or view.kind == "hub" or "://" in view.path
    place = view.path if elsewhere else str(folder / Path(str(view.path)).expanduser())
    return replace(view, name=name, path=place)
