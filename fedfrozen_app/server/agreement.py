"""Measure whether clients still move a group of parameters in a common direction: a rule for freezing it.

A round's clients send updates uᵢ of the group. Their drift D² = Σ wᵢ‖uᵢ‖² − ‖ū‖² measures disagreement.
Agreement cannot be measured in one round: the mean of m clients contains D²/(m−1) of disagreement, which
looks like movement, and clients with opposing updates have a small mean that may still point in a consistent
direction. Random disagreement does not repeat in the next round; movement does. So the rule monitors

    agreement = ⟨ūₜ, d⟩        d: running mean of the earlier rounds' ū (at first ūₜ itself)

whose expectation is the squared common movement for a cohort of any size. It freezes when, over a window, the
agreement has fallen below a small share of the drift and the model has stopped learning:

    mean of agreement < threshold · mean of drift    and
    mean training loss of a tenth of the run > (1 − progress) · that of the tenth before,

`patience` rounds in a row. A kernel can stand still for a while before the model learns, and freezing it then
loses accuracy; waiting until the loss stops falling only costs time. Clients that take one step per round do
not drift from their mean, so there is nothing to gain: then the rule never freezes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DECAY = 0.9  # of d: averages about ten rounds


@dataclass(frozen=True)
class Rule:
    minimum: int = 1  # rounds before which nothing is frozen
    cap: int | None = None  # rounds after which the group is frozen in any case; None: no such round
    threshold: float = 0.005
    window: int = 5
    patience: int = 3
    progress: float = 0.05  # still learning: the loss falls by more than this share in `span` rounds
    span: int = 5


def ratio(agreement: Sequence[float], drift: Sequence[float], window: int) -> float | None:
    """Agreement over drift in the last `window` rounds; None without any drift."""
    total = sum(drift[-window:])
    return sum(agreement[-window:]) / total if total > 0 else None


def still_learns(losses: Sequence[float | None], rule: Rule) -> bool:
    """Whether the mean loss still falls by `progress` from one `span` to the next; true if unknown."""
    span = rule.span
    known = [loss for loss in losses[-2 * span :] if loss is not None]
    if len(known) < 2 * span:
        return True
    return sum(known[span:]) < (1 - rule.progress) * sum(known[:span])


def freeze_after(
    agreement: Sequence[float], drift: Sequence[float], losses: Sequence[float | None], rule: Rule
) -> int | None:
    """The number of rounds, counted from the first, after which to freeze; None: not yet."""
    calm = 0
    for done in range(1, len(drift) + 1):
        now = ratio(agreement[:done], drift[:done], rule.window)
        if now is None:  # no disagreement: freezing could only cost
            calm = 0
            continue
        calm = calm + 1 if now < rule.threshold and not still_learns(losses[:done], rule) else 0
        if done == rule.cap or (done >= rule.minimum and calm >= rule.patience):
            return done
    return None


@dataclass
class Agreement:
    """A run's measurements of one group. Rows contain the metrics; only `direction` must be saved."""

    rule: Rule
    rounds: list[int] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    direction: dict[str, Tensor] = field(default_factory=dict)  # d
    decided: int | None = None  # of a resumed run: the last round before the freeze, by any rule

    @property
    def last_round(self) -> int | None:
        """The last round in which the group trains, once the rule has decided."""
        if self.decided is not None:
            return self.decided
        done = freeze_after(self.agreement, self.drift, self.losses, self.rule)
        return None if done is None else self.rounds[done - 1]

    def add(self, row: Mapping[str, Any], group: str, update: Mapping[str, Tensor]) -> dict[str, Any]:
        """Add a round: its row, and its mean update of the group. Returns the metrics for the row."""
        drift, spare = row["drift"][group], row["effective_clients"] - 1
        square = drift["rms"] ** 2
        metrics = {
            "agreement": follow(self.direction, update),
            "drift": square,
            # Common movement estimated from this round alone: ‖ū‖² minus its expectation for random updates.
            "signal": drift["mean_update"] ** 2 - square / spare if spare > 0 else None,
        }
        self._note(row, metrics)
        return metrics | {"ratio": ratio(self.agreement, self.drift, self.rule.window)}

    def recall(self, row: Mapping[str, Any], *, frozen: bool = False) -> None:
        """Add a row from before the run was resumed; `frozen`: the group was frozen in that round."""
        if "warmup" in row:
            self._note(row, row["warmup"])
        elif frozen and self.decided is None:
            self.decided = row["round"] - 1

    def _note(self, row: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        self.rounds.append(row["round"])
        self.losses.append(row.get("train_loss"))
        self.agreement.append(metrics["agreement"])
        self.drift.append(metrics["drift"])


def follow(direction: dict[str, Tensor], update: Mapping[str, Tensor]) -> float:
    """The agreement ⟨ū, d⟩ of a round's mean update; then adds ū to the running mean `direction`, d."""
    parts = []
    for name, tensor in update.items():
        earlier = direction.setdefault(name, tensor)
        parts.append((tensor * earlier).sum(dtype=torch.float64))
        direction[name] = torch.lerp(tensor, earlier, DECAY)
    return torch.stack(parts).sum().item()
