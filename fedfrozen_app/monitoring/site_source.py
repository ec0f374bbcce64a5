"""Metrics of a site, from its files and its SuperNode, as far as its policy allows.

Activity metrics are shown only with `monitoring: activity`. None is about fewer rows than the census's floor,
and none contains text of the site or the server.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.proposal import HASH
from fedfrozen_app.monitoring.audit_tail import AuditTail
from fedfrozen_app.monitoring.families import ALLOWED, SITE, Collected
from fedfrozen_app.monitoring.machine import Machine
from fedfrozen_app.monitoring.site_parts import Parts
from fedfrozen_app.sites.clock_offset import last_offset
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.link import Contact, SuperNodeClient
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.site_budget import SiteBudget

PATIENCE = 3.0  # seconds for the SuperNode's answer on this machine
REMEMBERED = 120.0  # seconds for which the last answer counts while the SuperNode restarts
TENS = 10.0  # seconds: rounding hides work on a few rows more or less


@dataclass
class SiteSource:
    folder: Path
    parts: Parts
    tail: AuditTail
    machine: Machine
    _contact: tuple[float, Contact] | None = field(default=None)

    @classmethod
    def of(cls, kit: Kit) -> "SiteSource":
        machine = Machine({"var": kit.var}, {kit.name: kit.folder / "node.crt"})
        return cls(kit.folder, Parts(kit.meeting), AuditTail(kit.audit), machine)

    def collect(self) -> Collected:
        kit = Kit.read(self.folder)
        policy = Policy.read(kit.policy)  # changes apply from the next scrape
        if policy.monitoring == "none":
            raise UserError(
                f"{kit.policy} shows no numbers (monitoring: none): set it to health, or to activity."
            )
        found = Collected(SITE, ALLOWED[policy.monitoring])
        self.tail.follow()
        self.machine.collect(found)
        self._processes(found)
        self._link(kit, found)
        self._approvals(kit, found)
        self._records(kit, policy, found)
        return found

    def _processes(self, found: Collected) -> None:
        for name, part in self.parts.found().items():
            found.add("fedfrozen_site_up", part.up, part=name)
            found.add("fedfrozen_site_stalled_seconds", part.stalled, part=name)
        state = self.parts.found()["executor"].state
        found.add("fedfrozen_site_in_hand", state in ("pulling", "working", "without room", "pushing"))
        for phase, seconds in self.parts.seconds.items():
            found.add("fedfrozen_site_seconds", seconds // TENS * TENS, phase=phase)

    def _link(self, kit: Kit, found: Collected) -> None:
        now = time.monotonic()
        if self.parts.found()["supernode"].up:
            try:
                with SuperNodeClient(kit) as client:
                    self._contact = now, client.contact(PATIENCE)
            except (httpx.HTTPError, OSError, UserError, KeyError, ValueError):
                pass  # starting, or not answering: the age of its last answer shows that
        # From the SuperNode's file: with a wrong clock the server refuses it, and it ends.
        found.add("fedfrozen_site_clock_offset_seconds", last_offset(kit.meeting))
        if self._contact is None or now - self._contact[0] > REMEMBERED:
            return
        contact = self._contact[1]
        if contact.answered is not None:
            found.add("fedfrozen_site_server_silence_seconds", now - contact.answered)
        found.add("fedfrozen_site_link_delay_seconds", contact.link.get("delay"))
        for way, speed in contact.link.get("speed", {}).items():
            found.add("fedfrozen_site_link_bytes_per_second", speed, way=way)
        for way, size in contact.link.get("bytes", {}).items():
            found.add("fedfrozen_site_bytes", size, way=way)

    def _approvals(self, kit: Kit, found: Collected) -> None:
        waiting = waiting_since(kit.approvals)
        found.add("fedfrozen_site_waiting_approvals", len(waiting))
        oldest = max(0.0, time.time() - min(waiting)) if waiting else 0.0
        found.add("fedfrozen_site_oldest_approval_seconds", oldest)

    def _records(self, kit: Kit, policy: Policy, found: Collected) -> None:
        tail, budget = self.tail, SiteBudget(kit.var / "state" / "budget.json")
        refused = policy.bundles != "any" and tail.bundle != "" and tail.bundle not in policy.bundles
        found.add("fedfrozen_site_version_refused", refused)
        found.add("fedfrozen_site_rounds", tail.rounds)
        for state, count in sorted(tail.replies.items()):
            found.add("fedfrozen_site_replies", count, state=state)
        found.add("fedfrozen_site_examples", floored(tail.examples, policy.census_floor))
        try:
            epsilon, delta = budget.spent()
        except UserError:
            found.add("fedfrozen_site_record_sound", 0)
            return
        found.add("fedfrozen_site_record_sound", tail.sound)
        found.add("fedfrozen_site_epsilon_spent", epsilon)
        found.add("fedfrozen_site_epsilon_left", max(0.0, policy.max_epsilon - epsilon))
        found.add("fedfrozen_site_epsilon_limit", policy.max_epsilon)
        found.add("fedfrozen_site_delta_left", max(0.0, policy.max_delta - delta))


def floored(count: int | None, floor: int) -> int | None:
    """The count; None if there is none, or it is below the floor."""
    return count if count is not None and count >= floor else None


def waiting_since(folder: Path) -> list[float]:
    """When each undecided proposal was shown to the people of the site."""
    found = []
    for path in folder.glob("*.json") if folder.is_dir() else ():
        if HASH.fullmatch(path.stem) and not path.with_suffix(".decision").exists():
            try:
                found.append(path.stat().st_mtime)
            except FileNotFoundError:  # just withdrawn
                continue
    return found
