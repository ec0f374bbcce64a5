"""The history in the audit log: first requests and their bundles, past runs, and spent epsilon."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Entry = Mapping[str, Any]
ANSWERS = ("sent", "census", "survival")  # events that give something about the site's rows


@dataclass
class PastRun:
    """What left under one proposal: updates of a run, or the answers of a census or a study."""

    run: str
    proposal: str
    kind: str  # the event: sent, census, survival
    first: str
    last: str = ""
    rounds: set[int] = field(default_factory=set)
    messages: int = 0
    bytes: int = 0
    epsilon: float | None = None


@dataclass(frozen=True)
class Spent:
    """Epsilon of all runs after an answer."""

    time: str
    run: str
    epsilon: float


@dataclass
class RuleRefusal:
    """Requests that the site refused without asking a person, of one run and for one reason."""

    run: str
    reason: str
    times: int = 0
    last: str = ""


def rule_refusals(entries: Sequence[Entry]) -> list[RuleRefusal]:
    """The latest first."""
    found: dict[tuple[str, str], RuleRefusal] = {}
    for entry in entries:
        if entry["event"] != "refused":
            continue
        run, reason = str(entry.get("run", "")), str(entry.get("reason", ""))
        one = found.setdefault((run, reason), RuleRefusal(run, reason))
        one.times, one.last = one.times + 1, entry["time"]
    return sorted(found.values(), key=lambda one: one.last, reverse=True)


def first_asked(entries: Sequence[Entry], proposal: str) -> Entry | None:
    """The first entry about this proposal."""
    return next((entry for entry in entries if entry.get("proposal") == proposal), None)


def bundle_of(entries: Sequence[Entry], proposal: str) -> str | None:
    """The bundle of the last message about this proposal."""
    found = (entry["bundle"] for entry in reversed(entries) if entry.get("proposal") == proposal)
    return next((str(bundle) for bundle in found if bundle), None)


def past_runs(entries: Sequence[Entry]) -> list[PastRun]:
    """The latest first."""
    found: dict[tuple[str, str], PastRun] = {}
    for entry in entries:
        if entry["event"] not in ANSWERS:
            continue
        run, proposal = str(entry.get("run", "")), str(entry.get("proposal", ""))
        past = found.setdefault((run, proposal), PastRun(run, proposal, entry["event"], entry["time"]))
        past.last = entry["time"]
        past.messages += 1
        past.bytes += int(entry.get("bytes", 0))
        past.epsilon = entry.get("epsilon")
        if "round" in entry:
            past.rounds.add(entry["round"])
    return sorted(found.values(), key=lambda past: past.last, reverse=True)


def spending(entries: Sequence[Entry]) -> list[Spent]:
    """The points at which the total of all runs rose, oldest first."""
    found: list[Spent] = []
    for entry in entries:
        total = entry.get("epsilon_all_runs")
        if total is not None and total > (found[-1].epsilon if found else 0.0):
            found.append(Spent(entry["time"], str(entry.get("run", "")), float(total)))
    return found
