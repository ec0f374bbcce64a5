"""What a deployed run writes of its sites while it waits, and how often."""

from types import SimpleNamespace

import pytest

from fedfrozen_app.files.presence import read_presence
from fedfrozen_app.server import presence_writer
from fedfrozen_app.server.closed_sites import ClosedSites
from fedfrozen_app.server.lateness import Awaited, Lateness
from fedfrozen_app.server.membership import MUTE, Invitation, Membership, NodeState
from fedfrozen_app.server.presence_writer import PresenceWriter
from fedfrozen_app.server.transport import Transport

SITES = {1: "north", 2: "south", 3: "west", 4: "east", 5: "far"}


class Grid:
    """Who is connected, and how often somebody asked."""

    def __init__(self) -> None:
        self.online, self.asked = [1, 2, 3, 4], 0

    def get_node_ids(self):
        self.asked += 1
        return list(self.online)


@pytest.fixture
def seen(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(presence_writer, "time", SimpleNamespace(monotonic=lambda: clock.now))
    membership = Membership(Transport(Grid()), Invitation(version="sources abc"), sites=SITES)
    return SimpleNamespace(
        clock=clock,
        folder=tmp_path,
        membership=membership,
        lateness=Lateness(),
        grid=membership.transport.grid,
        write=PresenceWriter(tmp_path, membership, lateness := Lateness()),
        known=lateness,
    )


def states(folder):
    return {site.name: site.state for site in read_presence(folder).sites}


def test_every_state(seen):
    nodes = seen.membership._nodes
    nodes[2] = NodeState(waiting=True, name="south")
    nodes[3] = NodeState(refusal="the site west refused; its own log says why")
    nodes[4] = NodeState(refusal=MUTE)
    seen.write()
    assert states(seen.folder) == {
        "north": "there",
        "south": "waiting",
        "west": "refused",
        "east": "mute",
        "far": "silent",
    }
    assert read_presence(seen.folder).version == "sources abc"


def test_busy_late_and_there_again(seen):
    seen.membership.last_state["north"] = "was sent the request of round 3"
    seen.known.awaited = Awaited(seen.known, lambda: "The site north", 3, 0.0, 0.0, "north", troubled=False)
    seen.known.awaited.began = float("inf")
    seen.write()
    assert states(seen.folder)["north"] == "busy" and read_presence(seen.folder).round == 3
    seen.clock.now += 2
    seen.known.awaited.troubled = True
    seen.write()
    assert states(seen.folder)["north"] == "late"
    seen.clock.now += 2
    seen.membership.last_state["north"] = "answered round 3"
    seen.write()
    assert states(seen.folder)["north"] == "there"


def test_a_state_keeps_its_moment_and_files_are_rare(seen, monkeypatch):
    moments = iter(f"2026-01-01T00:00:{second:02d}+00:00" for second in range(60))
    monkeypatch.setattr(presence_writer, "moment", lambda: next(moments))
    seen.write()
    since = {site.name: site.since for site in read_presence(seen.folder).sites}
    path = seen.folder / "flower" / "presence.json"
    first = path.read_text()
    for _ in range(40):  # four seconds of waiting, ten times a second
        seen.clock.now += 0.1
        seen.write()
    assert path.read_text() == first and seen.grid.asked == 1
    seen.clock.now += 5
    seen.grid.online = [2, 3, 4, 5]
    seen.write()
    later = {site.name: site for site in read_presence(seen.folder).sites}
    assert later["south"].since == since["south"] and later["north"].state == "silent"
    assert later["north"].since != since["north"] and seen.grid.asked == 2


def test_a_disk_that_is_full_stops_no_round(seen, monkeypatch):
    def full(folder, found):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(presence_writer, "write_presence", full)
    seen.write()
    assert read_presence(seen.folder) is None


def test_an_excluded_site_is_not_watched(seen):
    seen.membership.excluded = frozenset({"far"})
    seen.write()
    assert "far" not in states(seen.folder)


def test_where_no_round_waits_each_site_is_late_by_its_own_and_a_closed_one_sleeps(seen):
    seen.write.closed = ClosedSites()
    seen.known.round = 7
    for name in ("north", "south"):
        seen.membership.last_state[name] = "was sent the request of round 6"
        seen.known.at_work[name] = Awaited(seen.known, lambda: "The site", 6, 0.0, float("inf"), name)
    seen.known.at_work["south"].troubled = True
    seen.write.closed.close("west", "The site west", 3600.0)
    seen.write()
    found = {site.name: site for site in read_presence(seen.folder).sites}
    assert {name: found[name].state for name in ("north", "south", "west", "east")} == {
        "north": "busy",
        "south": "late",
        "west": "asleep",
        "east": "there",
    }
    assert "is outside its opening hours, and is asked again at " in found["west"].sentence
    assert read_presence(seen.folder).round == 7
