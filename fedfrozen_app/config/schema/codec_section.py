"""`codec.*`: how updates, and what the server broadcasts, are coded for the wire."""

from dataclasses import dataclass
from typing import ClassVar

from fedfrozen_app.config.needs import Needs, not_with, only_with
from fedfrozen_app.config.settings import setting

EITHER = "codec|codec.down"
QUANTISED = only_with(EITHER, "int8", "int4", add="codec=int8 or int4")
FACTORED = only_with(EITHER, "lowrank")
SPARSE = only_with(EITHER, "topk", "randomk", add="codec=topk or randomk")


@dataclass
class CodecConfig:
    """The same for all clients of a run: a site checks every request against them."""

    NEEDS: ClassVar[tuple[Needs, ...]] = (not_with(EITHER, "none", add="codec=int8 or another codec"),)
    name: str = setting(
        "none",
        "Set by the file. What an uploaded update is coded as: `none` (as it is), `float16`, `bfloat16`, "
        "`int8`, `int4`, `topk`, `randomk`, `lowrank`, or one that a package brings; see [Codecs](codecs.md)",
    )
    down: str = setting(
        "none",
        "The same for what the server broadcasts: how the model has changed since a client last got it. "
        "Clients train from what they decode, and what is lost is in the next round's code",
    )
    block: int = setting(
        128, "Values that share one scale, which takes four bytes", least=8, most=65_536, needs=QUANTISED
    )
    rotate: bool = setting(
        False,
        "`true`: rotate updates at random before they are rounded, so that a few large values do not make "
        "the steps of all others coarse",
        needs=QUANTISED,
    )
    share: float = setting(
        0.1,
        "The share of each array's values that is sent; the others are added to the client's next update",
        above=0,
        most=1,
        needs=SPARSE,
    )
    rank: int = setting(
        2,
        "Columns of the two factors that are sent of each matrix; what they leave out is added to the "
        "client's next update",
        least=1,
        most=4096,
        needs=FACTORED,
    )

    @property
    def is_used(self) -> bool:
        """Whether anything is coded."""
        return self.name != "none" or self.down != "none"
