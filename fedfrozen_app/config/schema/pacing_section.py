"""`pacing.*`: when the server steps, and what becomes of late replies."""

from dataclasses import dataclass
from typing import ClassVar

from fedfrozen_app.config.needs import Needs, not_with, only_with
from fedfrozen_app.config.settings import setting

DEADLINE, BUFFERED = only_with("pacing", "deadline"), only_with("pacing", "buffered")
USED = not_with("pacing.late", "drop", add="pacing.late=use")


@dataclass
class PacingConfig:
    """Defaults of `deadline` are in its file: a synchronous run has none."""

    NEEDS: ClassVar[tuple[Needs, ...]] = (only_with("pacing", "deadline", "buffered"),)
    name: str = setting(
        "synchronous",
        "Set by the file. `synchronous`: a round waits for all its clients; `deadline`: it closes after a "
        "time or a share of replies; `buffered`: clients are always at work, and the server steps whenever "
        "some replies are in; see [Pacing](pacing.md)",
        choices=("synchronous", "deadline", "buffered"),
    )
    seconds: float | None = setting(
        None, "The virtual time after which a round closes. `null`: no limit", above=0, needs=DEADLINE
    )
    share: float | None = setting(
        None,
        "A round closes when this share of the clients that it asked have replied. `null`: all",
        above=0,
        most=1,
        needs=DEADLINE,
    )
    late: str = setting(
        "use",
        "Of a reply that comes after its round has closed: `use` it in the round in which it comes, with its "
        "staleness weight, or `drop` it",
        choices=("use", "drop"),
        needs=DEADLINE,
    )
    partial: bool = setting(
        False,
        "`true`: a client that would be late takes fewer local steps, as many as it has time for, at least "
        "one; needs `pacing.seconds`, and a strategy that divides updates by their steps (`fednova`)",
        needs=DEADLINE,
    )
    buffer: int | None = setting(
        None,
        "The server steps when so many replies are in. `null`: half of `pacing.concurrency`",
        least=1,
        needs=BUFFERED,
    )
    concurrency: int | None = setting(
        None,
        "So many clients are at work at any time. `null`: as many as `participation` says",
        least=1,
        needs=BUFFERED,
    )
    staleness_weight: str = setting(
        "inverse_sqrt",
        "What an update counts that is `τ` steps of the server old: `inverse_sqrt` (`1/√(1+τ)`), `inverse` "
        "(`1/(1+τ)`) or `constant` (1)",
        choices=("inverse_sqrt", "inverse", "constant"),
        needs=USED,
    )
    max_staleness: int | None = setting(
        None, "A reply that is more steps old is dropped. `null`: none is", least=0, needs=USED
    )
