"""`adapter.*`: low-rank adapters on a frozen model."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fedfrozen_app.config.needs import Needs, not_with
from fedfrozen_app.config.settings import setting


@dataclass
class AdapterConfig:
    NEEDS: ClassVar[tuple[Needs, ...]] = (not_with("adapter", "none", add="adapter=lora"),)
    name: str = setting(
        "none",
        "Set by the file. `lora`: the model's weights are frozen, and low-rank adapters on them train "
        "and travel, with the head; see [Adapters](adapters.md)",
    )
    rank: int = setting(8, "r: of each adapter, and the largest that a client may have", least=1)
    alpha: float = setting(16.0, "An adapter's product counts α/r times", above=0)
    dropout: float = setting(0.0, "Of what an adapter reads, in training", least=0, most=0.9)
    targets: Any = setting(
        ["query", "value"],
        "Which projections have one, by role: of `query`, `key`, `value`, `output`, `mlp`, `kernel` and "
        "`all`, or a role with its layer (`value.0`)",
    )
    layers: str | None = setting(
        None, "In these layers alone, from 0: `adapter.layers=8-11`, or one. `null`: all"
    )
    rule: str = setting(
        "average",
        "How clients' adapters become one: `average`, `ffa`, `fedex` or `stack`; see [Adapters](adapters.md)",
    )
    ranks: dict[str, Any] = setting(
        {}, "Smaller ranks of single clients, by name: `+adapter.ranks.0=4`. All others have `adapter.rank`"
    )
    path: str | None = setting(None, "Start from the adapters of a peft folder. `null`: from fresh ones")
