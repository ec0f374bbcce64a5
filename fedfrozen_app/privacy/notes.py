"""What a private run says of itself: at its start, and in the header of every model it writes."""

from pathlib import Path
from typing import Any

from fedfrozen_app.config import PrivacyConfig
from fedfrozen_app.errors import UserError
from fedfrozen_app.files.checkpoint import partition_differences
from fedfrozen_app.privacy.steps import SLACK

UNACCOUNTED = (
    "privacy.selection=unaccounted: which layers a client sends is chosen from its private data without "
    "noise. Everybody sees that choice, and epsilon does not cover what it tells."
)
SEEDED = "privacy.seeded_noise=true: whoever knows the seed can take the noise off again. NOTHING IS PRIVATE."


IN_SUM = (
    "secure_aggregation.noise=sum: epsilon is that of the federation's sums, and of the model. It holds for "
    "those who see sums alone: if the server and as many clients as the threshold leaves unmask one client's "
    "numbers, or other clients leave out or tell their shares of the noise, less is promised. What clients "
    "who conspire have added does not count: with c of the t needed, noise shrinks to √((t − c)/t)."
)


def opening_lines(privacy: PrivacyConfig, *, in_sum: bool = False) -> list[str]:
    if privacy.name == "none":
        return []
    delta = "min(1e-5, 0.1/examples)" if privacy.delta is None else f"{privacy.delta:g}"
    lines = [
        f"Differential privacy: each client spends at most epsilon {privacy.epsilon:g} per {privacy.unit} at "
        f"delta {delta} ({privacy.accountant} accountant). docs/privacy.md says what that covers."
    ]
    if in_sum:
        lines.append(IN_SUM)
    if privacy.selection == "unaccounted":
        lines.append(UNACCOUNTED)
    if privacy.seeded_noise:
        lines.append(SEEDED)
    if privacy.audited is not None:
        lines.append(
            f"privacy.audited={privacy.audited}: {canaries_in(privacy)}. This run is for `fedfrozen audit`, "
            "and its model not for use."
        )
    return lines


def audit_mark(privacy: PrivacyConfig) -> dict[str, Any] | None:
    """What rows and the summary of an audited run say of it."""
    return None if privacy.audited is None else {"client": privacy.audited, "canaries": privacy.canaries}


def canaries_in(privacy: PrivacyConfig) -> str:
    return f"up to {privacy.canaries} canaries among the examples of client {privacy.audited}"


def model_metadata(privacy: PrivacyConfig) -> dict[str, str]:
    """For the header of a model's file, so that it is told apart wherever it goes."""
    if privacy.name == "none":
        return {"privacy": "none"}
    planted = {} if privacy.audited is None else {"audit": f"NOT FOR USE: {canaries_in(privacy)}"}
    if privacy.seeded_noise:
        return planted | {"privacy": "NOT PRIVATE: the noise was seeded"}
    but = ", but not the choice of layers" if privacy.selection == "unaccounted" else ""
    return planted | {
        "privacy": f"epsilon at most {privacy.epsilon:g} per {privacy.unit}, for each client{but}"
    }


def check_start(
    now: dict[str, Any], earlier: dict[str, Any], row: dict[str, Any], records: Path | None
) -> None:
    """A model that has seen these data cannot be made more private afterwards.

    `now` and `earlier` are whole configurations, `row` the earlier run's last. `records` is where that run's
    clients kept theirs; None where they are sites, which have records and rows of their own.
    """
    planted = [part.get("privacy", {}).get("audited") for part in (now, earlier)]
    if planted[0] != planted[1]:
        raise UserError(
            f"The checkpoint comes from a run with privacy.audited={_null(planted[1])}, and this run has "
            f"{_null(planted[0])}: a model that has seen canaries would pass for one that has not. Start "
            f"anew, or use privacy.audited={_null(planted[1])}."
        )
    if _source(now["dataset"]) != _source(earlier.get("dataset", {})):
        return
    promise, then = _promise(now["privacy"]), _promise(earlier.get("privacy", {}))
    if then != promise:
        raise UserError(
            f"The checkpoint comes from a run with {then} on the same data, and this run has {promise}: its "
            f"epsilon would not be true. Start anew, or use {then}."
        )
    if now["privacy"]["name"] == "none":
        return
    epsilon, spent = now["privacy"]["epsilon"], row.get("epsilon_max", 0.0)
    if spent > epsilon * (1 + SLACK):
        raise UserError(
            f"privacy.epsilon={epsilon:g} is less than the {spent:.3f} that a client has spent already: "
            "set it to more than that, or start anew."
        )
    if records is None:
        return
    if other := partition_differences(now, earlier):
        raise UserError(
            f"This run would deal rows of which the run before has spent privacy to other clients "
            f"({', '.join(other)} differ), and their records would not know it: keep the same, or start anew."
        )
    for client in row.get("epsilon", {}):
        if not (records / f"{client}.json").is_file():
            raise UserError(
                f"The checkpoint's client {client} has spent privacy, and there is no record of it in "
                f"{records}: put that folder back, or start anew."
            )


def _null(value: str | None) -> str:
    return "null" if value is None else value


def _source(dataset: dict[str, Any]) -> tuple[Any, ...]:
    """Where rows come from: however many are read and whatever is done with them, they are the same data."""
    path = dataset.get("path")
    return dataset.get("kind"), None if path is None else Path(path).expanduser().resolve()


def _promise(privacy: dict[str, Any]) -> str:
    """What a run's epsilon is worth, by the key that says so."""
    if privacy.get("name", "none") == "none":
        return "privacy=none"
    if privacy["seeded_noise"]:
        return "privacy.seeded_noise=true"
    return "privacy.selection=unaccounted" if privacy["selection"] == "unaccounted" else "privacy=dp_sgd"
