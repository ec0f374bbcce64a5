"""Runs with and without secure aggregation, compared."""

import torch

from tests.conftest import Run

ON = "secure_aggregation=on"
AMPLIFIED = 10  # rounding of the first rounds is trained on in the later ones
PLAIN = ("client.optimizer=sgd", "client.weight_decay=0", "client.lr=0.05")


def far(one: Run, other: Run, after: int | None = None) -> float:
    """The largest difference of a weight. Key biases move by rounding alone, and are left out."""
    models = [run.model if after is None else run.model_after(after) for run in (one, other)]
    names = [name for name in models[0] if "key.bias" not in name]
    return max(float((models[0][name] - models[1][name]).abs().max()) for name in names)


def last_bits(run: Run) -> float:
    """What a float32 cannot tell apart in these weights, once in each of the two models."""
    return 2 * torch.finfo(torch.float32).eps * max(float(value.abs().max()) for value in run.model.values())


def stated(run: Run) -> float:
    """What rounding can have moved a weight by, over all rounds, if later rounds did not amplify it."""
    return sum(row["secure"]["rounding"] for row in run.rows[1:])


def within_rounding(plain: Run, masked: Run, times: float = 1) -> None:
    """In the first round, which begins alike, by no more than what is said; then as training amplifies it.
    `times`: by how much the server multiplies the clients' mean, which the rounding is of."""
    assert 0 < stated(masked) < 1e-4
    assert far(plain, masked, after=1) <= times * masked.rows[1]["secure"]["rounding"] + last_bits(plain)
    assert far(plain, masked) <= AMPLIFIED * stated(masked) + last_bits(plain)
