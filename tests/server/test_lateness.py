"""What the operator reads while a reply is late, a site is gone, or its executor fails."""

import re

import pytest

from fedfrozen_app.server import lateness, transport
from fedfrozen_app.server.lateness import Awaited, Lateness
from fedfrozen_app.server.transport import Transport

REPLY = object()  # nobody looks into it here


class Clock:
    """Time passes only while somebody sleeps."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Grid:
    """One reply, some time after the request."""

    def __init__(self, clock: Clock, after: float) -> None:
        self.clock, self.at, self.probes = clock, clock.now + after, 0

    def push_messages(self, messages):
        self.probes += 1
        return [f"probe {self.probes}"]

    def pull_messages(self, message_ids):
        return [REPLY] if message_ids == ["request"] and self.clock.now >= self.at else []


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    for module in (lateness, transport):
        monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr(transport, "alive_message", lambda node, lifetime: node)
    return found


def wait(clock: Clock, known: Lateness, after: float, patience: float = 600.0) -> tuple[object, bool]:
    awaited = Awaited(known, lambda: "The site north", 4, clock.now + patience, clock.now)
    found = Transport(Grid(clock, after)).receive_or_lost(
        1, "request", clock.now + patience, probe=True, awaited=awaited
    )
    awaited.ended(answered=found[0] is not None)
    return found


def told(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_late_reply_is_told_once_with_its_end(clock, caplog):
    assert wait(clock, Lateness(slowest=2.0), 100) == (REPLY, False)
    late, answered = told(caplog)
    assert re.fullmatch(
        r"The site north has not answered round 4 since \d\d:\d\d:\d\d \(1[56] s\): it trains longer than "
        r"usual, or its executor, disk or network fails; the executor's log says which. The round waits for "
        r"it until \d\d:\d\d:\d\d\.",
        late,
    )
    assert re.fullmatch(r"The site north answered round 4 after 10[01] s\.", answered)


def test_what_is_late_follows_the_slowest_reply_of_the_run(clock, caplog):
    known = Lateness()
    wait(clock, known, 50)  # before any other, a minute
    assert not caplog.records and known.slowest == pytest.approx(50, abs=0.6)
    wait(clock, known, 140)  # less than three times that
    assert not caplog.records
    known.slowest = 2.0
    wait(clock, known, 30)
    assert len(told(caplog)) == 2 and known.slowest == 2.0  # a troubled reply is no measure


def test_a_reply_that_never_comes_is_told_as_late_and_not_as_answered(clock, caplog):
    assert wait(clock, Lateness(2.0), 1e9, patience=90) == (None, False)
    assert len(told(caplog)) == 1
