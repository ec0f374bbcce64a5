"""Writes a deployed run's view of its sites, while it waits for them."""

import datetime
import logging
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedfrozen_app.files.presence import Presence, SiteState, write_presence
from fedfrozen_app.server.closed_sites import ClosedSites
from fedfrozen_app.server.lateness import Lateness
from fedfrozen_app.server.membership import MUTE, Membership

log = logging.getLogger(__name__)
LOOK, WRITE = 1.0, 5.0  # seconds between checks, and between equal files
CONNECTED = 5.0  # seconds between queries to the SuperLink for connected nodes


@dataclass
class PresenceWriter:
    """Called repeatedly while the server waits (`Transport.on_wait`)."""

    folder: Path
    membership: Membership
    lateness: Lateness
    closed: ClosedSites = field(default_factory=ClosedSites)
    _states: dict[str, SiteState] = field(default_factory=dict)
    _online: frozenset[int] = frozenset()
    _asked: float | None = None
    _looked: float | None = None
    _wrote: float | None = None

    def __call__(self) -> None:
        now = time.monotonic()
        if self._looked is not None and now - self._looked < LOOK:
            return
        self._looked = now
        found = self._look(now)
        if found == self._states and self._wrote is not None and now - self._wrote < WRITE:
            return
        self._states, self._wrote = found, now
        invitation, awaited = self.membership.invitation, self.lateness.awaited
        written = Presence(
            moment(),
            awaited.round if awaited is not None else self.lateness.round,
            invitation.proposal.hash if invitation.proposal is not None else "",
            invitation.version,
            tuple(found.values()),
        )
        try:
            write_presence(self.folder, written)
        except OSError as error:  # the file's age shows that it is old; the run itself does not need it
            log.debug("presence.json could not be written: %s", error)

    def _look(self, now: float) -> dict[str, SiteState]:
        if self._asked is None or now - self._asked >= CONNECTED:
            self._asked, self._online = now, frozenset(self.membership.transport.grid.get_node_ids())
        found = {}
        for node, name in self.membership.sites.items():
            if name in self.membership.excluded:
                continue
            new, before = self._state(node, name), self._states.get(name)
            same = before is not None and before.state == new.state
            found[name] = replace(new, since=before.since if same and before is not None else moment())
        return found

    def _state(self, node: int, name: str) -> SiteState:
        last = self.membership.last_state.get(name, "")
        state, sentence = self._state_of(node, name, last)
        return SiteState(name, state, "", last, sentence)

    def _state_of(self, node: int, name: str, last: str) -> tuple[str, str]:
        """(state, why)."""
        if node not in self._online:
            return "silent", ""
        if node in self.membership.waiting:
            return "waiting", ""
        if (refusal := self.membership.refusals.get(node)) is not None:
            return ("mute" if refusal == MUTE else "refused"), refusal
        if closed := self.closed.sentence(name):
            return "asleep", closed
        if last.startswith("was sent"):
            awaited = self.lateness.of(name)
            late = awaited is not None and awaited.is_late
            return ("late" if late else "busy"), ""
        if last.startswith("did not answer"):
            return "mute", last
        return "there", ""


def moment() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
