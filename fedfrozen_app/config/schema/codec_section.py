"""`codec.*`: how updates are coded for the wire."""

from dataclasses import dataclass
from typing import ClassVar

from fedfrozen_app.config.needs import Needs, not_with, only_with
from fedfrozen_app.config.settings import setting

QUANTISED, SPARSE = only_with("codec", "int8", "int4"), only_with("codec", "topk", "randomk")


@dataclass
class CodecConfig:
    """The same for all clients of a run: a site checks every request against them."""

    NEEDS: ClassVar[tuple[Needs, ...]] = (not_with("codec", "none", add="codec=int8 or another codec"),)
    name: str = setting(
        "none",
        "Set by the file. What an uploaded update is coded as: `none` (as it is), `float16`, `bfloat16`, "
        "`int8`, `int4`, `topk`, `randomk`, or one that a package brings; see [Codecs](codecs.md)",
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
