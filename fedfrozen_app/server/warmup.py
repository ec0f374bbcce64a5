"""The warm-up before part of the model is frozen: a number of rounds, or by a rule."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from fedfrozen_app.config import setting
from fedfrozen_app.config.needs import only_with
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files.rows import Row
from fedfrozen_app.server import federation
from fedfrozen_app.server.agreement import Rule

AUTO = "auto"
# Share of the rounds, for settings that are null. A freeze after three quarters cost at most 0.2 points in
# any cell of docs/results/freezing-under-tuning.md, on held-out seeds; earlier ones cost up to 10.
SHARES = {"warmup_rounds": 0.75, "warmup_minimum": 0.75}
LEAST_SPAN = 3  # rounds: with fewer, the mean loss is too noisy
WARMUP, FROZEN = "warmup", "frozen"  # the two stages
# A chart of the rule's measurements: the metrics that it adds to a row under `warmup`.
CURVE = (
    "warmup.ratio",
    "Kernel: agreement between rounds / drift between clients",
    "over the rule's window",
)
BY_RULE = only_with("strategy.warmup_rounds", AUTO)
UNDECIDED = "When auto freezes is found out in training: these are the bytes if it never does."
COMPARES_ROUNDS = "strategy.warmup_rounds=auto compares the movement of rounds"


@dataclass(frozen=True)
class Settings(federation.Settings):
    warmup_rounds: int | str | None = setting(
        None,
        "Rounds of full training before the freeze, from 0 to `num_rounds`. `null`: three quarters of "
        "`num_rounds`, at least 1 (a resumed run that has frozen stays so). `auto`: until the kernel's "
        "common movement has faded; see [theory](theory.md)",
    )
    warmup_minimum: int | None = setting(
        None,
        "`auto`: freeze no earlier than after so many rounds. `null`: three quarters of `num_rounds`, at "
        "least 1",
        needs=BY_RULE,
    )
    warmup_cap: int | None = setting(
        None, "`auto`: freeze at the latest after so many rounds. `null`: it may never freeze", needs=BY_RULE
    )
    warmup_threshold: float = setting(
        Rule.threshold,
        "`auto`: freeze when agreement between rounds falls below this share of the drift",
        needs=BY_RULE,
    )
    warmup_window: int = setting(
        Rule.window, "`auto`: rounds that agreement and drift are averaged over", least=1, needs=BY_RULE
    )
    warmup_patience: int = setting(
        Rule.patience, "`auto`: rounds in a row that must say so", least=1, needs=BY_RULE
    )
    warmup_progress: float = setting(
        Rule.progress,
        "`auto`: the model still learns, and nothing is frozen, while its training loss falls by more than "
        "this share in `warmup_span` rounds",
        least=0,
        most=1,
        needs=BY_RULE,
    )
    warmup_span: int | None = setting(
        None,
        "`auto`: rounds in which a loss must fall. `null`: a tenth of `num_rounds`, at least 3",
        least=1,
        needs=BY_RULE,
    )

    def checked(self, num_rounds: int) -> Self:
        super().checked(num_rounds)
        filled = {name: getattr(self, name) for name in (*SHARES, "warmup_cap")}
        for name, share in SHARES.items():
            if filled[name] is None:
                filled[name] = min(max(1, round(share * num_rounds)), num_rounds)
        if self.warmup_span is None:
            filled["warmup_span"] = max(LEAST_SPAN, round(0.1 * num_rounds))
        for name, value in filled.items():
            if name == "warmup_span" or value is None or (name == "warmup_rounds" and value == AUTO):
                continue
            if not isinstance(value, int):
                raise UserError(f"strategy.{name}={value} is unknown: give a number of rounds, or auto.")
            if not 0 <= value <= num_rounds:
                raise UserError(
                    f"strategy.{name}={value} must lie between 0 and num_rounds={num_rounds}: "
                    "lower it, or raise num_rounds."
                )
        return replace(self, **filled)

    @classmethod
    def kept_by(cls, had: Mapping[str, Any], last: Row) -> dict[str, Any]:
        """Keep null settings, which are shares of the rounds: with more rounds they would unfreeze names."""
        if last["stage"] != FROZEN:
            return {}
        # With a fixed number of rounds the rule's own settings have no effect, and with fewer rounds their
        # values would be rejected.
        return dict(had) if had["warmup_rounds"] == AUTO else {"warmup_rounds": had["warmup_rounds"]}

    @property
    def rule(self) -> Rule:
        return Rule(
            minimum=self.warmup_minimum or 1,
            cap=self.warmup_cap,
            threshold=self.warmup_threshold,
            window=self.warmup_window,
            patience=self.warmup_patience,
            progress=self.warmup_progress,
            span=self.warmup_span or LEAST_SPAN,
        )
