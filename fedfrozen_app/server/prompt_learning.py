"""Base of strategies that prompt a frozen dual encoder: global prompts are shared, all else is private.

A strategy defines how its clients read the encoders (`reading`), and their loss if that is not the plain one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.files.rows import Row
from fedfrozen_app.server import base

if TYPE_CHECKING:
    from fedfrozen_app.adapters.prompted import Prompted
    from fedfrozen_app.adapters.prompts import PromptedDual

ACTIVE = 0.01  # a fused prompt with a smaller distance to the global one: the fusion did nothing
DROWNED = 10.0  # with a larger distance nothing of the global prompt is left


class PromptLearning(base.PlannedFedAvg):
    personal = True  # baselines too are evaluated per client, for comparison

    @classmethod
    def reading(cls) -> "type[PromptedDual]":
        """The client's model class. Imported on call: configurations are read without transformers."""
        from fedfrozen_app.adapters.prompts import PromptedDual

        return PromptedDual

    @classmethod
    def wrapper(cls, settings: Any) -> "Prompted":
        from fedfrozen_app.adapters.prompted import Prompted

        return Prompted(settings, cls.reading())

    def plan(self, server_round: int) -> Plan:
        private = [name for name in self.model if not name.endswith(".global")]
        return super().plan(server_round).keep_private(private)

    def client_metric_names(self) -> tuple[str, ...]:
        towers = self.settings.towers
        return tuple(f"{what}_{tower}" for what in ("local_moved", "fusion_gap") for tower in towers)

    @classmethod
    def sums_up(cls, rows: Sequence[Row]) -> dict[str, Any]:
        """The final relative distance of fused prompts to the global ones, by encoder."""
        last = next((row for row in reversed(rows) if any(key.startswith("fusion_gap") for key in row)), {})
        gaps = {key: value for key, value in last.items() if key.startswith("fusion_gap")}
        return {"fusion": {**gaps, "state": state_of(max(gaps.values()))}} if gaps else {}


def state_of(gap: float) -> str:
    """The state of a fusion: `gap` is the relative distance of its prompt to the global one."""
    if gap < ACTIVE:
        return "fusion inactive"
    return "fusion active" if gap <= DROWNED else "fusion drowns the global prompt"
