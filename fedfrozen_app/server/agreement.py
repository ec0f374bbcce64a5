"""When to freeze: the rule behind `strategy.warmup_rounds=auto`.

A round's clients send updates uᵢ of the kernel. Their drift D² = Σ wᵢ‖uᵢ‖² − ‖ū‖² is what they disagree in.
What they agree in cannot be read off one round: the mean of m clients carries D²/(m−1) of disagreement,
which looks like movement, and clients that pull against each other leave a mean that is small although it
still goes somewhere. But disagreement that is chance does not come back in the next round, and movement
does. So the rule watches

    agreement = ⟨ūₜ, d⟩        d: running mean of the earlier rounds' ū (at first ūₜ itself)

whose expectation is the squared common movement for a cohort of any size, and freezes when, over a window, it
has fallen below a small share of the drift:

    mean of agreement < threshold · mean of drift,   `patience` rounds in a row
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from fedfrozen_app.config import setting
from fedfrozen_app.errors import UserError
from fedfrozen_app.server import base

AUTO = "auto"
DECAY = 0.9  # of d: about the last ten rounds


@dataclass(frozen=True)
class Rule:
    minimum: int = 1  # rounds that are warm-up in any case
    cap: int | None = None  # rounds after which the kernel is frozen in any case; None: no such round
    threshold: float = 0.005
    window: int = 5
    patience: int = 3


def ratio(agreement: Sequence[float], drift: Sequence[float], window: int) -> float | None:
    """Agreement over drift in the last `window` rounds; None where no drift was seen."""
    total = sum(drift[-window:])
    return sum(agreement[-window:]) / total if total > 0 else None


def freeze_after(agreement: Sequence[float], drift: Sequence[float], rule: Rule) -> int | None:
    """The number of warm-up rounds that these rounds, from the first on, ask for; None: go on."""
    quiet = 0
    for done in range(1, len(drift) + 1):
        now = ratio(agreement[:done], drift[:done], rule.window)
        if now is None:  # nobody disagrees: freezing could only cost
            quiet = 0
            continue
        quiet = quiet + 1 if now < rule.threshold else 0
        if done == rule.cap or (done >= rule.minimum and quiet >= rule.patience):
            return done
    return None


@dataclass(frozen=True)
class WarmupSettings(base.Settings):
    warmup_rounds: int | str | None = setting(
        None,
        "Rounds of full training before the freeze, from 0 to `num_rounds`. `null`: a fifth of "
        "`num_rounds`, at least 1 (a resumed run that has frozen stays so). `auto`: until the kernel's "
        "common movement has faded; see [theory](theory.md)",
    )
    warmup_minimum: int | None = setting(
        None,
        "`auto`: freeze no earlier than after so many rounds. `null`: a tenth of `num_rounds`, at least 1",
    )
    warmup_cap: int | None = setting(
        None, "`auto`: freeze at the latest after so many rounds. `null`: it may never freeze"
    )
    warmup_threshold: float = setting(
        Rule.threshold, "`auto`: freeze when agreement between rounds falls below this share of the drift"
    )
    warmup_window: int = setting(
        Rule.window, "`auto`: rounds that agreement and drift are averaged over", least=1
    )
    warmup_patience: int = setting(Rule.patience, "`auto`: rounds in a row that must say so", least=1)

    def checked(self, num_rounds: int) -> Self:
        super().checked(num_rounds)
        shares = {"warmup_rounds": 0.2, "warmup_minimum": 0.1}
        filled = {name: getattr(self, name) for name in (*shares, "warmup_cap")}
        for name, share in shares.items():
            if filled[name] is None:
                filled[name] = min(max(1, round(share * num_rounds)), num_rounds)
        for name, value in filled.items():
            if value is None or (name == "warmup_rounds" and value == AUTO):
                continue
            if not isinstance(value, int):
                raise UserError(f"strategy.{name}={value} is unknown: give a number of rounds, or auto.")
            if not 0 <= value <= num_rounds:
                raise UserError(
                    f"strategy.{name}={value} must lie between 0 and num_rounds={num_rounds}: "
                    "lower it, or raise num_rounds."
                )
        return replace(self, **filled)

    @property
    def rule(self) -> Rule:
        return Rule(
            minimum=self.warmup_minimum or 1,
            cap=self.warmup_cap,
            threshold=self.warmup_threshold,
            window=self.warmup_window,
            patience=self.warmup_patience,
        )


@dataclass
class Watch:
    """What a run has seen of its kernel. The rows hold the figures; only `direction` is state of its own."""

    rule: Rule
    rounds: list[int] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)
    direction: dict[str, Tensor] = field(default_factory=dict)  # d

    @property
    def last_round(self) -> int | None:
        """The warm-up's last round, once the rule has found it."""
        done = freeze_after(self.agreement, self.drift, self.rule)
        return None if done is None else self.rounds[done - 1]

    def see(self, row: Mapping[str, Any], update: Mapping[str, Tensor]) -> dict[str, Any]:
        """Take in a round's row and its mean update of the kernel; the figures for the row."""
        drift, spare = row["drift"]["kernel"], row["effective_clients"] - 1
        square = drift["rms"] ** 2
        figures = {
            "agreement": follow(self.direction, update),
            "drift": square,
            # The common movement by this round alone: ‖ū‖² less what chance puts into so many clients' mean.
            "signal": drift["mean_update"] ** 2 - square / spare if spare > 0 else None,
        }
        self.recall(row["round"], figures)
        return figures | {"ratio": ratio(self.agreement, self.drift, self.rule.window)}

    def recall(self, server_round: int, figures: Mapping[str, Any]) -> None:
        self.rounds.append(server_round)
        self.agreement.append(figures["agreement"])
        self.drift.append(figures["drift"])


def follow(direction: dict[str, Tensor], update: Mapping[str, Tensor]) -> float:
    """The agreement ⟨ū, d⟩ of a round's mean update; `direction`, d, then takes it in."""
    parts = []
    for name, tensor in update.items():
        earlier = direction.setdefault(name, tensor)
        parts.append((tensor * earlier).sum(dtype=torch.float64))
        direction[name] = torch.lerp(tensor, earlier, DECAY)
    return torch.stack(parts).sum().item()
