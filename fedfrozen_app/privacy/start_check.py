"""Whether a run with this privacy may start from an earlier run's checkpoint."""

from pathlib import Path
from typing import Any

from fedfrozen_app.config.differences import partition_differences
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.privacy.steps import SLACK


def check_start(
    now: dict[str, Any], earlier: dict[str, Any], row: dict[str, Any], records: Path | None
) -> None:
    """Check the start: a model that was trained on these data cannot be made more private afterwards.

    `now` and `earlier` are full configurations, `row` the earlier run's last metrics. `records` is the folder
    of that run's client records; None for sites, which keep their own records and rows.
    """
    planted = [part.get("privacy", {}).get("audited") for part in (now, earlier)]
    if planted[0] != planted[1]:
        raise UserError(
            f"The checkpoint comes from a run with privacy.audited={_null(planted[1])}, and this run has "
            f"{_null(planted[0])}: a model that has seen canaries would pass for one that has not. Start "
            f"a new run, or use privacy.audited={_null(planted[1])}."
        )
    if _source(now["dataset"]) != _source(earlier.get("dataset", {})):
        return
    promise, then = _promise(now["privacy"]), _promise(earlier.get("privacy", {}))
    if then != promise:
        raise UserError(
            f"The checkpoint comes from a run with {then} on the same data, and this run has {promise}: its "
            f"epsilon would not be true. Start a new run, or use {then}."
        )
    if now["privacy"]["name"] == "none":
        return
    epsilon, spent = now["privacy"]["epsilon"], row.get("epsilon_max", 0.0)
    if spent > epsilon * (1 + SLACK):
        raise UserError(
            f"privacy.epsilon={epsilon:g} is less than the {spent:.3f} that a client has spent already: "
            "set it to more than that, or start a new run."
        )
    if records is None:
        return
    if other := partition_differences(now, earlier):
        raise UserError(
            f"This run would deal rows of which the run before has spent privacy to other clients "
            f"({', '.join(other)} differ), and their records would not know it: keep the same, or start "
            "a new run."
        )
    for client in row.get("epsilon", {}):
        if not (records / f"{client}.json").is_file():
            raise UserError(
                f"The checkpoint's client {client} has spent privacy, and there is no record of it in "
                f"{records} ({client}.json): put that folder back, or start a new run."
            )


def _null(value: str | None) -> str:
    return "null" if value is None else value


def _source(dataset: dict[str, Any]) -> tuple[Any, ...]:
    """The source of the rows, independent of how many are read and how they are processed."""
    path = dataset.get("path")
    return dataset.get("kind"), None if path is None else Path(path).expanduser().resolve()


def _promise(privacy: dict[str, Any]) -> str:
    """The privacy guarantee of a run, as the setting that declares it."""
    if privacy.get("name", "none") == "none":
        return "privacy=none"
    if privacy["seeded_noise"]:
        return "privacy.seeded_noise=true"
    return "privacy.selection=unaccounted" if privacy["selection"] == "unaccounted" else "privacy=dp_sgd"
