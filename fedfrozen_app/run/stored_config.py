"""A run folder's configuration: treated as data, never executed.

A folder may come from anybody. Its overrides are used as plain values: interpolations and sweeps are replaced
by their values at the time, no group may name a file outside `conf/`, and Hydra's own settings are ignored.
`outside.py` lists what the configuration would access beyond local files.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfrozen_app.config import ComposedConfig, compose_run, quoted, read
from fedfrozen_app.config.older import older_dataset, worked_out
from fedfrozen_app.config.unused_keys import check_used
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import flatten, printable
from fedfrozen_app.data.text_reading import LEARNED
from fedfrozen_app.files.readers import check_file
from fedfrozen_app.run.data_record import TOKENIZER
from fedfrozen_app.run.job import checked_settings
from fedfrozen_app.run.outside import Outside, is_known, outside
from fedfrozen_app.run.own_record import check_given
from fedfrozen_app.run.plain_overrides import parsed_overrides, plain_overrides


def stored_config(
    run: Path,
    overrides: Sequence[Any],
    had: Mapping[str, Any],
    extra: Sequence[str] = (),
    *,
    trusted: bool = False,
    trains: bool = False,
) -> ComposedConfig:
    """The configuration in a folder, with the `extra` overrides of the command line. `UserError` if
    it names a source that no run on this machine has used, unless it is `trusted`."""
    check_given(run, trains=trains)
    plain = plain_overrides(run, overrides, had)
    extra = [*own_tokenizer(run, had), *extra]
    composed = as_it_was(plain, had, extra)
    given = {override.key_or_group for override in parsed_overrides(run, extra)}
    for wish in outside(composed.resolved, trains=trains):
        if trusted or is_known(wish) or all(_is_given(key, given) for key in wish.settings):
            continue
        before = outside(as_it_was(plain, had).resolved, trains=trains) if extra else []
        if not any(one.kind == wish.kind and is_known(one) for one in before):
            raise refusal(run, wish)
    return composed


def own_tokenizer(run: Path, had: Mapping[str, Any]) -> list[str]:
    """Overrides for the run's learned tokenizer: from other data it would learn another."""
    learned = (had.get("dataset") or {}).get("tokenizer") == LEARNED
    path = run.resolve() / TOKENIZER
    if not learned or not (check_file(path) or path.is_file()):
        return []
    return [quoted("++dataset.tokenizer", str(path))]


def refusal(run: Path, wish: Outside) -> UserError:
    keys = ", ".join(wish.settings)
    return UserError(
        f"{printable(str(run))} {wish.what}, which no run on this machine has named: add --trust-folder if "
        f"you trust whoever made this folder, or set {keys} on the command line."
    )


def as_it_was(overrides: Sequence[str], had: Mapping[str, Any], extra: Sequence[str] = ()) -> ComposedConfig:
    """A run's configuration from its plain overrides and `extra` ones.

    If a default has changed since they composed to `had`, the old value is kept, so that a continued or
    loaded run does not change.
    """
    places = [word for word in extra if word.lstrip("+").startswith("hydra.")]  # search path of `conf/` files
    today = compose_run([*overrides, *places], recorded=True)
    # Files may have moved, and this may be another machine: `extra` may set new paths.
    config = read(today.resolved | {"from": None}, here=False)
    before = flatten(dict(had))
    changed = {
        key: before[key]
        for key, value in flatten(today.resolved | checked_settings(config)).items()
        if value is not None and before.get(key, value) != value
    }
    dataset = had.get("dataset") or {}
    for key, value in (*worked_out(dataset), *older_dataset(dataset)):
        if today.resolved["dataset"][key] != value:
            changed[f"dataset.{key}"] = value
    more = [*(quoted(f"++{key}", value) for key, value in changed.items()), *extra]
    if not more:
        return today
    found = compose_run([*overrides, *more], recorded=True)
    check_used(extra, found.resolved)
    return found


def _is_given(key: str, given: set[str]) -> bool:
    """Whether a key is set, itself or with its group: `dataset=text` sets dataset.kind."""
    return key in given or key.partition(".")[0] in given
