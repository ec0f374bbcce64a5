"""What a private run says of itself: at its start, and in the header of every model it writes."""

from typing import Any

from fedfrozen_app.config import PrivacyConfig
from fedfrozen_app.errors import UserError

UNACCOUNTED = (
    "privacy.selection=unaccounted: which layers a client sends is chosen from its private data without "
    "noise. Everybody sees that choice, and epsilon does not cover what it tells."
)
SEEDED = "privacy.seeded_noise=true: whoever knows the seed can take the noise off again. NOTHING IS PRIVATE."


def opening_lines(privacy: PrivacyConfig) -> list[str]:
    if privacy.name == "none":
        return []
    delta = "min(1e-5, 0.1/examples)" if privacy.delta is None else f"{privacy.delta:g}"
    lines = [
        f"Differential privacy: each client spends at most epsilon {privacy.epsilon:g} per {privacy.unit} at "
        f"delta {delta} ({privacy.accountant} accountant). docs/privacy.md says what that covers."
    ]
    if privacy.selection == "unaccounted":
        lines.append(UNACCOUNTED)
    if privacy.seeded_noise:
        lines.append(SEEDED)
    return lines


def model_metadata(privacy: PrivacyConfig) -> dict[str, str]:
    """For the header of a model's file, so that it is told apart wherever it goes."""
    if privacy.name == "none":
        return {"privacy": "none"}
    if privacy.seeded_noise:
        return {"privacy": "NOT PRIVATE: the noise was seeded"}
    return {"privacy": f"epsilon at most {privacy.epsilon:g} per {privacy.unit}, for each client"}


def check_start(config: PrivacyConfig, dataset: dict[str, Any], earlier: dict[str, Any]) -> None:
    """A model that has seen these data without noise cannot be made private afterwards."""
    then = earlier.get("privacy", {}).get("name", "none")
    if then == config.name or earlier.get("dataset") != dataset:
        return
    raise UserError(
        f"The checkpoint comes from a run with privacy={then} on the same data, and this run has "
        f"privacy={config.name}: its epsilon would not be true. Start anew, or use privacy={then}."
    )
