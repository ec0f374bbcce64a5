"""What surrounds a strategy: the run it is part of, its settings, and what is done after its rounds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor

from fedfrozen_app.config import AggregationConfig, check_settings
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.files.rows import Row
from fedfrozen_app.models.design import PromptDesign
from fedfrozen_app.models.roles import KERNEL, Role
from fedfrozen_app.server.conversation import Conversation

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]  # Flower's: what the server judges a model by


class Hook(Protocol):
    """Something done after every round: write, save, show, stop."""

    def after_round(self, strategy: Any, row: Row) -> tuple[bool, Row]:
        """Whether to stop, and what to add to the round's row; `strategy` is the one whose round it was."""


@dataclass(frozen=True)
class Settings:
    """A strategy's own settings; empty for those that have none."""

    def checked(self, num_rounds: int) -> Self:
        """Themselves with defaults filled in, or a `UserError`."""
        check_settings(self, "strategy.")
        return self

    def prompt_design(self) -> PromptDesign | None:
        """The prompts through which this strategy reads a frozen dual encoder; None: it trains the model."""
        return None


@dataclass
class Federation:
    """What a strategy needs to know of the run around it."""

    conversation: Conversation
    participation: float = 1.0
    seed: int = 0
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    # Sees round, client, reply and model before the reply enters the sum.
    watch: Callable[[int, str, Reply, Mapping[str, Tensor]], None] | None = None
    private: bool = False  # clients add noise, and must know how often they will be drawn

    @property
    def roles(self) -> Mapping[str, Role]:
        return self.conversation.roles

    def drift_group(self, model: Mapping[str, Tensor], name: str) -> str | None:
        """The part of the model that this array's drift counts for; None leaves it out."""
        role = self.roles[name]
        if role.kind == "key" and model[name].ndim == 1:
            return None  # softmax ignores key biases: their movement is rounding noise
        return "kernel" if role.kind in KERNEL else "rest"
