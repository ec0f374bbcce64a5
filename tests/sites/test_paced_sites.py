"""Pacing over sites in this process: opening hours, and a server killed while requests are at work."""

import datetime
from collections import Counter
from types import SimpleNamespace

import pytest

from fedfrozen_app.server import closed_sites
from fedfrozen_app.sites import handle_train
from fedfrozen_app.sites.audit_log import read_audit
from tests.conftest import same_bits
from tests.sites.independent_budget import check_budget
from tests.sites.inprocess import SiteGrid

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SYNCHRONOUS = ("strategy.warmup_rounds=1", "num_rounds=3", "++runtime.round_timeout=600")
BUFFERED = (*SYNCHRONOUS, "pacing=buffered", "pacing.concurrency=3", "pacing.buffer=2")
STEPS = 2  # of a private request
PRIVATE = (
    *("strategy=fedavg", "num_rounds=4", "pacing=buffered", "pacing.concurrency=3", "pacing.buffer=2"),
    *("privacy=dp_sgd", "privacy.epsilon=3", "privacy.delta=1e-5", "privacy.accountant=rdp"),
    *(f"client.local_steps={STEPS}", "client.batch_size=8", "++runtime.round_timeout=600"),
)


class Killed(Exception):
    """The server ends as if it were killed: nothing is written on the way."""


def closed_for(monkeypatch, seconds):
    """West is closed at its first request, and opens in so many seconds."""
    calls = Counter()

    def opens_at(intervals):
        if not intervals or calls["west"] >= 2:  # one that decides, and one that says when it opens
            return None
        calls["west"] += 1
        return datetime.datetime.now() + datetime.timedelta(seconds=seconds)

    monkeypatch.setattr(handle_train, "opens_at", opens_at)


def events(sites, name, event):
    return [entry for entry in read_audit(sites.kit(name).audit) if entry["event"] == event]


def test_a_closed_site_holds_nobody_up_and_takes_part_when_it_opens(sites, monkeypatch):
    """The server's seconds are the messages that sites have handled."""

    class Ticking(SiteGrid):
        ticks = 0

        def run_client(self, message):
            Ticking.ticks += 1
            return super().run_client(message)

    monkeypatch.setattr(closed_sites, "time", SimpleNamespace(monotonic=lambda: float(Ticking.ticks)))
    sites.change("west", "policy.yaml", availability=["Mon 00:00-00:01"])
    closed_for(monkeypatch, 4)
    run = sites.train(*BUFFERED, "num_rounds=6", make_grid=Ticking)
    assert all(row["clients_failed"] == 0 for row in run.rows[1:]), [r.get("failures") for r in run.rows]
    closed = [row for row in run.rows[1:] if row["pacing"].get("outside_hours") == ["west"]]
    assert closed and all(row["clients"] == ["north", "south"] for row in closed)
    later = [row["round"] for row in run.rows[1:] if "west" in row["clients"]]
    assert later and min(later) > closed[-1]["round"]
    assert len(events(sites, "west", "closed")) == 1
    # It was asked again: nothing is trained for the round in which it was closed.
    assert 1 not in {entry["round"] for entry in events(sites, "west", "sent")}


def test_a_synchronous_round_waits_for_a_site_that_opens_in_time(sites, monkeypatch):
    whole = sites.train(*SYNCHRONOUS, "run_id=whole", folder="whole")
    sites.change("west", "policy.yaml", availability=["Mon 00:00-00:01"])
    closed_for(monkeypatch, 1)
    run = sites.train(*SYNCHRONOUS, "run_id=late", folder="late")
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 3, 3]
    assert same_bits(whole.model, run.model)


@pytest.mark.parametrize("pulls", [3, 5, 6, 8])
def test_a_killed_server_asks_again_and_every_site_pays_once(sites, pulls):
    """By so many replies it is killed. Nothing is trained twice, and the budgets are what was trained."""
    for name in sites.names:
        sites.change(name, "policy.yaml", strategies=["fedavg"], max_delta=1e-4)

    class Fatal(SiteGrid):
        pulled = 0

        def pull_messages(self, message_ids):
            found = super().pull_messages(message_ids)
            self.pulled += any(message.metadata.message_type == "train" for message in found)
            if self.pulled == pulls:
                raise Killed
            return found

    with pytest.raises(Killed):
        sites.train(*PRIVATE, make_grid=Fatal)
    run = sites.train(*PRIVATE, resume=True)
    assert [row["round"] for row in run.rows] == [0, 1, 2, 3, 4]
    assert all(row["clients_failed"] == 0 for row in run.rows[1:]), [r.get("failures") for r in run.rows]
    spent = {}
    for row in run.rows[1:]:
        spent |= row["epsilon"]
    for name in sites.names:
        check_budget(sites.kit(name), STEPS, spent[name])
