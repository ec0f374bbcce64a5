"""The notices of a private run: at its start, and in the header of every model it writes."""

from typing import Any

from fedfrozen_app.config import PrivacyConfig

UNACCOUNTED = (
    "privacy.selection=unaccounted: which layers a client sends is chosen from its private data without "
    "noise. Others see that choice, and epsilon does not cover what it reveals."
)
SEEDED = "privacy.seeded_noise=true: anyone who knows the seed can remove the noise. NOTHING IS PRIVATE."


IN_SUM = (
    "secure_aggregation.noise=sum: epsilon is that of the federation's sums, and of the model. It holds for "
    "those who see sums alone: if the server and as many clients as the threshold leaves unmask one client's "
    "numbers, or a third of a round's clients or more leave out or reveal their shares of the noise, less is "
    "promised."
)


def opening_lines(privacy: PrivacyConfig, *, in_sum: bool = False) -> list[str]:
    if privacy.name == "none":
        return []
    delta = "min(1e-5, 0.1/examples)" if privacy.delta is None else f"{privacy.delta:g}"
    lines = [
        f"Differential privacy: each client spends at most epsilon {privacy.epsilon:g} per {privacy.unit} at "
        f"delta {delta} ({privacy.accountant} accountant). docs/privacy.md explains what that covers."
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
    """The mark of an audited run, for its rows and its summary."""
    return None if privacy.audited is None else {"client": privacy.audited, "canaries": privacy.canaries}


def canaries_in(privacy: PrivacyConfig) -> str:
    return f"up to {privacy.canaries} canaries among the examples of client {privacy.audited}"


def model_metadata(privacy: PrivacyConfig) -> dict[str, str]:
    """For the header of a model's file, so that it can be recognised wherever it goes."""
    if privacy.name == "none":
        return {"privacy": "none"}
    planted = {} if privacy.audited is None else {"audit": f"NOT FOR USE: {canaries_in(privacy)}"}
    if privacy.seeded_noise:
        return planted | {"privacy": "NOT PRIVATE: the noise was seeded"}
    but = ", but not the choice of layers" if privacy.selection == "unaccounted" else ""
    return planted | {
        "privacy": f"epsilon at most {privacy.epsilon:g} per {privacy.unit}, for each client{but}"
    }
