"""`secure_aggregation.*`: masked sums."""

from dataclasses import dataclass
from typing import ClassVar

from fedfrozen_app.config.needs import Needs, only_with
from fedfrozen_app.config.settings import setting


@dataclass
class SecureAggregationConfig:
    """The same for all clients of a run: a site checks every request against them."""

    NEEDS: ClassVar[tuple[Needs, ...]] = (only_with("secure_aggregation", "on"),)
    name: str = setting(
        "off",
        "Set by the file. `on`: clients mask what they send, and the server learns sums over a round's "
        "clients, never one client's update; see [Secure aggregation](secure-aggregation.md)",
        choices=("off", "on"),
    )
    min_cohort: int = setting(
        3, "No sum over fewer clients. A site's policy has a floor for it", least=2, most=100_000
    )
    threshold: float = setting(
        2 / 3,
        "Share of a round's clients that must stay to its end, or it changes nothing; always more than half. "
        "A site's policy has a floor for it",
        least=0.5,
        most=1,
    )
    neighbours: int | None = setting(
        None,
        "How many others each client draws to share masks with. `null`: all, or 160 where a round has more. "
        "A site's policy has a floor for it",
        least=2,
    )
    bits: int = setting(
        32,
        "Of every number that travels: 8, 12, 16, 24 or 32; see [Masked sums of few bits](masked-bits.md)",
        least=8,
        most=32,
    )
    rotate: bool = setting(
        False,
        "`true`: rotate updates at random before they are clipped and rounded, so that `clip` can be low",
    )
    renew: float | None = setting(
        None,
        "A round's clip is so many times the root mean square of the last round's updates, in the array "
        "where it is largest, and at most `clip`; the server knows it from the sums. `null`: always `clip`",
        least=3.5,
        needs=only_with("secure_aggregation.rotate", "true"),
    )
    quantile: float | None = setting(
        None,
        "The share of clients whose updates are to stay within the clip: each says, inside the masked sum, "
        "whether its own does, and the next round's clip follows, never above `clip`. `null`: always `clip`",
        above=0,
        most=0.99,
    )
    quantile_share: float = setting(
        0.05,
        "The share of the privacy loss that this count takes, which has noise of its own",
        above=0,
        most=0.5,
        needs=only_with("secure_aggregation.noise", "sum"),
    )
    clip: float = setting(
        1.0, "Largest change of a single weight in a round; what is larger is clipped, and counted", above=0
    )
    state_clip: float = setting(
        10.0, "The same for a method's other arrays, such as SCAFFOLD's variates", above=0
    )
    max_norm: float | None = setting(
        None, "Largest norm of a client's whole update, kept by the client itself. `null`: none", above=0
    )
    max_examples: int = setting(
        10_000, "No client counts for more examples in the mean", least=1, most=10_000_000
    )
    noise: str = setting(
        "site",
        "Of `privacy=dp_sgd`: `site` (each client's update has all its noise) or `sum` (each client adds a "
        "share, and the sum has the whole; one step a round over all rows); see "
        "[Privacy](privacy.md#noise-in-the-sum)",
        choices=("site", "sum"),
        needs=only_with("privacy", "dp_sgd"),
    )
    choices: str = setting(
        "union",
        "Where clients choose layers (`strategy=safl`): `union` (a client sends zeros for those that it did "
        "not choose, and no one learns what it chose) or `groups` (clients send their choice first, and "
        "those with one choice make a sum of their own, of these layers alone); see "
        "[A masked round](masked-rounds.md#where-clients-choose-layers)",
        choices=("union", "groups"),
    )
    step_timeout: float = setting(
        60, "Seconds to wait for a client in the steps that carry keys and no update", above=0
    )

    @property
    def renews(self) -> bool:
        """Whether a round's clip follows from the sums of the round before."""
        return self.renew is not None or self.quantile is not None
