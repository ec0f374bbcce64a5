"""Requests of nodes that take real time: lost, repeated, interrupted, refused; each is asked for once."""

import pytest
import torch
from flwr.app import Error, Message, MessageType
from flwr.common.constant import ErrorCode

from fedfrozen_app.config import compose_run
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.exchange.messages import train_request_text
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import TrainRequest, read_train_request
from fedfrozen_app.files import checkpoint
from fedfrozen_app.files.rows import first_rounds
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.run.federate import federate
from fedfrozen_app.run.job import Job
from fedfrozen_app.server import flights
from fedfrozen_app.server.asked_file import AskedFile
from fedfrozen_app.server.closed_sites import ClosedSites
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server.live_pacing import InFlight, LivePacing, RealTime, arrays_named
from fedfrozen_app.server.make_pacer import make_pacer
from fedfrozen_app.server.request_messages import ClientRequest
from tests.conftest import SMALL, Run, same_bits
from tests.server.test_unreliable import BAD, Grid, without_pictures

BUFFERED = (
    *("runtime=flower", "pacing=buffered", "pacing.concurrency=3", "pacing.buffer=2", "strategy=fedavg"),
    "client.lr_schedule=constant",  # so that a run of three rounds is the beginning of one of five
)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    without_pictures(monkeypatch)


class Recorded(Grid):
    """Remembers what each node was asked, as (round, digest)."""

    def __init__(self, words) -> None:
        super().__init__(words)
        self.asked: dict[int, list] = {node: [] for node in self.contexts}
        self.newest = 0

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == MessageType.TRAIN:
                request = read_train_request(train_request_text(message))
                self.asked[message.metadata.dst_node_id].append((request.round, request.digest))
                self.newest = max(self.newest, request.round)
        return super().push_messages(messages)


class Asleep(Recorded):
    """The bad node replies to its first request once round 4 has begun."""

    def replies(self, server_round, node, answer):
        return [] if node == BAD and server_round and self.newest < 4 else [answer()]


def run(folder, make_grid, *more, resume=False):
    words = [*SMALL, "++runtime.round_timeout=3600", "++runtime.node_timeout=60", *BUFFERED]
    words += [f"++runtime.cache_dir={folder}/cache", *more]
    composed = compose_run(words)
    corpus = load_corpus(composed.config)
    worker = Worker(composed.config, corpus, shares=share_out(corpus, composed.config, 3))
    grid = make_grid(words)
    connection = connect(grid, worker.roles, data_spec=worker.data_spec, hello_timeout=5)
    federate(
        Job(composed, folder / "run", checkpoint.newest(folder / "run") if resume else None),
        connection,
        worker,
    )
    return Run(folder / "run"), grid


def test_a_resumed_run_sends_the_very_same_request_again_to_the_same_bits(tmp_path):
    """A node is at work on round 1 when the run ends after round 3. Resumed, it goes on as if it had not."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole, _ = run(tmp_path / "whole", Asleep, "num_rounds=5")
    _, before = run(tmp_path / "parts", Asleep, "num_rounds=3")
    resumed, after = run(tmp_path / "parts", Asleep, "num_rounds=5", resume=True)
    assert [number for number, _ in before.asked[BAD]] == [1]
    assert after.asked[BAD][0] == before.asked[BAD][0], "another request was made"
    assert ["1", 3] in whole.rows[4]["pacing"]["used"]
    assert [row["pacing"] for row in whole.rows[1:]] == [row["pacing"] for row in resumed.rows[1:]]
    assert same_bits(whole.model, resumed.model)


def test_a_lost_request_is_sent_again_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(flights, "PAUSE", 0.0)

    class Crashes(Recorded):
        def replies(self, server_round, node, answer):
            if (server_round, node, self.polls) == (1, BAD, 0):
                self.polls = 1
                message = next(m for m in self.waiting.values() if m.metadata.dst_node_id == node)
                return [Message(Error(ErrorCode.CLIENT_APP_CRASHED, "it stopped"), reply_to=message)]
            return [answer()]

    found, grid = run(tmp_path, Crashes, "num_rounds=3")
    assert len(grid.asked[BAD]) > 1 and grid.asked[BAD][0] == grid.asked[BAD][1]
    assert [(number) for number, _ in grid.asked[BAD]].count(1) == 2
    assert sum(["1", age] in row["pacing"]["used"] for row in found.rows[1:] for age in range(4)) >= 1
    assert all(row["clients_failed"] == 0 for row in found.rows[1:])


def test_a_refusal_fills_no_buffer(tmp_path):
    class Refuses(Recorded):
        def replies(self, server_round, node, answer):
            if node != BAD or not server_round:
                return [answer()]
            message = next(m for m in self.waiting.values() if m.metadata.dst_node_id == node)
            return [Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "no"), reply_to=message)]

    found, _ = run(tmp_path, Refuses, "num_rounds=3", "pacing.buffer=1")
    assert [row["clients_ok"] for row in found.rows[1:]] == [1, 1, 1]


# Parts ----------------------------------------------------------------------------------------------------

REQUEST = TrainRequest(
    round=4,
    plan=Plan(("a", "b"), ("a",), ("b",)),
    base={"a": "digest of a", "c": "digest of c"},
    settings={"mu": 0.5},
    participations={"north": 3, "south": 3},
)


def pacing_of(config):
    return LivePacing(make_pacer(config.pacing, 0, 1.0), RealTime())


@pytest.fixture(scope="module")
def config():
    return compose_run([*SMALL, *BUFFERED]).config


def test_a_checkpoint_holds_the_requests_and_what_it_does_not_hold_anyway(config):
    old, same = torch.ones(2), torch.zeros(2)
    pacing = pacing_of(config)
    asked = ClientRequest("south", 7, REQUEST, {"a": old, "c": same})
    pacing.flights["south"] = InFlight.of(asked, "1", 0.0)
    arrays = pacing.arrays({"digest of c"})
    assert list(arrays) == ["digest of a"]
    later = pacing_of(config)
    later.load(pacing.state_dict(), arrays)
    (flight,) = later.resumed({"digest of c": same}, {"b": same}).values()
    assert flight is not None and flight.asked.request.digest == REQUEST.digest
    assert flight.message_id is None and flight.repeated and flight.version == 4
    assert torch.equal(flight.asked.model["a"], old) and torch.equal(flight.asked.model["b"], same)


def test_equal_arrays_of_a_request_share_no_memory():
    zeros = torch.zeros(3)
    found = arrays_named({"a": "0", "b": "0", "c": "0"}, {"0": zeros})
    assert all(torch.equal(value, zeros) for value in found.values())
    assert len({value.data_ptr() for value in found.values()}) == 3


def test_a_request_whose_model_is_gone_leaves_its_client_free(config):
    pacing = pacing_of(config)
    pacing.flights["south"] = InFlight.of(ClientRequest("south", 7, REQUEST, {}), "1", 0.0)
    later = pacing_of(config)
    later.load(pacing.state_dict(), {})
    assert later.resumed({"digest of c": torch.zeros(2)}, {}) == {"south": None}
    later.load(pacing.state_dict(), {}, excluded=["south"])
    assert later.resumed({}, {}) == {}


def test_who_was_asked_is_known_for_that_round_alone(tmp_path):
    asked = AskedFile.of(tmp_path)
    assert asked.read(1) == []
    asked.write(3, ["south", "north"])
    assert asked.read(3) == ["south", "north"] and asked.read(2) == [] == asked.read(4)
    asked.path.write_text("{")
    assert asked.read(3) == []


def test_a_first_round_is_the_one_that_asked():
    row = {"round": 1, "clients": ["0"], "pacing": {"asked": ["0", "1"], "used": [["0", 0]]}}
    assert first_rounds([row, {"round": 3, "clients": ["1", "2"]}]) == {"0": 1, "1": 1, "2": 3}


def test_a_closed_site_is_left_alone_until_it_opens(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("fedfrozen_app.server.closed_sites.time.monotonic", lambda: now[0])
    closed = ClosedSites()
    closed.close("north", "The site north", 50.0)
    closed.close("west", "The site west", 1e12)  # a site may say what it likes
    assert closed.is_closed("north") and "outside its opening hours" in closed.sentence("north")
    assert not closed.is_closed("south") and closed.sentence("south") == ""
    now[0] = 150.0
    assert not closed.is_closed("north") and closed.is_closed("west")
    now[0] += 8 * 24 * 3600
    assert not closed.is_closed("west")
