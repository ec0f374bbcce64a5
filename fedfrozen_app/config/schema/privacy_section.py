"""`privacy.*`: differential privacy on the client."""

from dataclasses import dataclass
from typing import ClassVar

from fedfrozen_app.config.needs import Needs, not_with, only_with
from fedfrozen_app.config.settings import setting


@dataclass
class PrivacyConfig:
    NEEDS: ClassVar[tuple[Needs, ...]] = (only_with("privacy", "dp_sgd"),)
    name: str = setting(
        "none",
        "Set by the file. `none`: data stay on the client, updates travel as they are. `dp_sgd`: "
        "differential privacy on the client",
        choices=("none", "dp_sgd"),
    )
    epsilon: float = setting(
        8.0, "What each client may spend over the whole run; then it declines", least=0.01, most=1000
    )
    delta: float | None = setting(
        None,
        "`null`: 1e-5, or 0.1 divided by the client's number of examples where that is less",
        above=0,
        most=0.5,
    )
    max_grad_norm: float = setting(
        1.0,
        "C: each example's gradient is clipped to this norm, over all trained parameters together",
        least=1e-6,  # far smaller ones have no digits left in float32, and clipped gradients would be longer
        most=1e6,
    )
    unit: str = setting(
        "example",
        "Whom epsilon protects. A larger unit gives one of its rows to a step",
        choices=("example", "document", "patient"),
    )
    unit_column: str | None = setting(
        None,
        "The column that names a row's document or patient. `null`: the one called like the unit",
        needs=only_with("privacy.unit", "document", "patient"),
    )
    examples: int | None = setting(
        None,
        "The number of examples (or other units) that every client declares: its weight, and what its "
        "sampling rate comes from. `null`: its true number, once, when it first takes part",
        least=1,
    )
    accountant: str = setting(
        "prv", "`prv` (numerical composition, tight) or `rdp` (Rényi)", choices=("prv", "rdp")
    )
    selection: str = setting(
        "noisy",
        "Layers that are chosen from private data: `noisy` (paid for), `public` (on the server's validation "
        "rows instead) or `unaccounted` (epsilon does not cover the choice)",
        choices=("noisy", "public", "unaccounted"),
    )
    selection_share: float = setting(
        0.1,
        "`noisy`: share of epsilon for the choices",
        above=0,
        most=0.9,
        needs=only_with("privacy.selection", "noisy"),
    )
    selection_every: int = setting(
        5,
        "`noisy`: choose again every so many rounds in which the client takes part",
        least=1,
        needs=only_with("privacy.selection", "noisy"),
    )
    selection_rate: float = setting(
        0.25,
        "`noisy`: chance of an example to count in a choice",
        above=0,
        most=1,
        needs=only_with("privacy.selection", "noisy"),
    )
    clipping: str = setting(
        "per_example",
        "`per_example`: each example's gradient is computed and clipped. `ghost`: the same sums with less "
        "memory, where only layers and heads are trained; see [Privacy](privacy.md)",
        choices=("per_example", "ghost"),
    )
    physical_batch: int = setting(
        64, "Examples whose gradients are in memory at once; changes no result", least=1
    )
    audited: str | None = setting(
        None,
        "Watch the client with this name and plant canaries among its examples, for `fedfrozen audit`: a run "
        "to test privacy with, not a model to use, and every output says so. `null`: none; see "
        "[Privacy](privacy.md#audit)",
    )
    canaries: int = setting(
        1000,
        "`audited`: so many made-up examples, each planted by a coin flip. A larger epsilon takes more of "
        "them to detect",
        least=0,
        needs=not_with("privacy.audited", "null", add="privacy.audited=CLIENT"),
    )
    seeded_noise: bool = setting(
        False,
        "`true`: noise and samples come from `seed`, to repeat a simulation. Not private, and every output "
        "says so",
    )
