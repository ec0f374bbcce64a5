"""Nodes that are slow, late, gone, back, doubled or in disguise: the real apps over a grid that is not there
when it should be."""

import shlex
import time

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from fedfrozen_app import client_app
from fedfrozen_app.config import compose_config, compose_run, read, resolved
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.exchange.hello_messages import WAITING, Hello, hello_reply
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.run.federate import federate
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server.membership import Invitation, Membership
from fedfrozen_app.server.transport import Transport
from fedfrozen_app.server_app import gather
from tests.conftest import SMALL, Run, same_bits

ROUNDS = (
    "num_rounds=3",
    "strategy.warmup_rounds=1",
    "++runtime.round_timeout=0.5",
    "++runtime.node_timeout=0.5",
)
BAD = 2  # the node that misbehaves: client 1


class Grid(InProcessGrid):
    """Serialises everything, and holds replies back; `online` are the nodes that it tells of."""

    def __init__(self, words) -> None:
        super().__init__(client_app.app, 3, {"overrides": shlex.join(words)})
        self.online = {node: node for node in self.contexts}  # the id it goes by: the one it has
        self.held: dict[str, tuple[int, Message]] = {}
        self.pulled: list[str] = []
        self.polls = 0
        for number, context in enumerate(self.contexts.values()):
            context.node_config.clear()
            context.node_config.update({"partition-id": number, "num-partitions": 3})

    def get_node_ids(self):
        return list(self.online)

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            message.metadata.dst_node_id = self.online.get(message.metadata.dst_node_id, 0)
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        (message_id,) = message_ids
        message = self.waiting[message_id]
        if message.metadata.dst_node_id == 0:  # nobody is there to answer
            return []
        number = int(message.metadata.group_id or 0)
        found = self.replies(number, message.metadata.dst_node_id, lambda: self.run_client(message))
        if found:
            self.pulled.append(message_id)
            del self.waiting[message_id]
        return found

    def replies(self, server_round, node, answer):
        return [answer()]


def run(tmp_path, make_grid, *more, folder="run"):
    words = [*SMALL, *ROUNDS, f"++runtime.cache_dir={tmp_path}/cache-{folder}", *more]
    composed = compose_run(words)
    config = composed.config
    corpus = load_corpus(config)
    worker = Worker(config, corpus, shares=share_out(corpus, config, 3))
    grid = make_grid(words)
    connection = connect(
        grid, worker.roles, data_spec=worker.data_spec, hello_timeout=config.runtime.node_timeout
    )
    federate(Job(composed, tmp_path / folder), connection, worker)
    return Run(tmp_path / folder), grid


def without_pictures(patch):
    patch.setattr("fedfrozen_app.report.output.write_curves", lambda *args, **kwargs: None)
    patch.setattr("fedfrozen_app.run.evaluation.draw_labels", lambda *args: None)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    without_pictures(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        return run(tmp_path_factory.mktemp("whole"), Grid, "++runtime.round_timeout=60", folder="whole")[0]


class Expiring(Grid):
    """As Flower's own: what was asked too long ago is gone, and the answer with it."""

    def replies(self, server_round, node, answer):
        if (server_round, node) == (self.silent_round, BAD):
            return []
        asked = reply_to(self, node).metadata
        if time.time() > asked.created_at + asked.ttl:
            expired = Error(ErrorCode.MESSAGE_UNAVAILABLE, "It may have expired due to its TTL")
            return [Message(expired, reply_to=reply_to(self, node))]
        return [answer()]


@pytest.mark.parametrize(("silent_round", "sound"), [(0, [2, 2]), (2, [3, 2])])  # 0: every hello
@pytest.mark.slow
def test_a_silent_node_does_not_take_the_others_answers_with_it(tmp_path, silent_round, sound):
    """It is waited for to the very end; what the others have sent meanwhile is fetched after that."""

    silent = type("Silent", (Expiring,), {"silent_round": silent_round})
    found, _ = run(tmp_path, silent, "num_rounds=2")
    assert [row["clients_ok"] for row in found.rows[1:]] == sound


@pytest.mark.slow
def test_a_slow_node_is_waited_for(tmp_path, whole):
    class Slow(Grid):
        def replies(self, server_round, node, answer):
            self.polls += 1
            return [answer()] if node != BAD or self.polls % 4 == 0 else []

    found, _ = run(tmp_path, Slow, "++runtime.round_timeout=60")
    assert same_bits(whole.model, found.model)
    assert all(row["clients_failed"] == 0 for row in found.rows[1:])


def test_a_late_reply_is_never_added(tmp_path):
    """In round 2 client 1 answers when the round has closed, which is as if it had said nothing."""

    class Late(Grid):
        def replies(self, server_round, node, answer):
            if (server_round, node) == (2, BAD):
                self.late = answer
                return []
            if server_round == 3 and node == BAD:
                self.late()  # it is done by now, and its reply lies at the server: nobody asks for it
            return [answer()]

    class Silent(Grid):
        def replies(self, server_round, node, answer):
            return [] if (server_round, node) == (2, BAD) else [answer()]

    found, _ = run(tmp_path, Late)
    twin, _ = run(tmp_path, Silent, folder="twin")
    assert same_bits(found.model, twin.model)
    assert [row["clients_ok"] for row in found.rows[1:]] == [3, 2, 3]
    assert found.rows[2]["failures"] == ["Client 1 was set aside: it did not answer within 0.5 s."]


@pytest.mark.slow
def test_a_reply_to_an_earlier_round_is_set_aside(tmp_path):
    class Behind(Grid):
        def replies(self, server_round, node, answer):
            reply = answer()
            if node == BAD and server_round == 1:
                self.old = reply
            if node == BAD and server_round == 2:
                return [self.old]
            return [reply]

    found, _ = run(tmp_path, Behind)
    assert [row["clients_ok"] for row in found.rows[1:]] == [3, 2, 3]
    assert "answers another request" in found.rows[2]["failures"][0]


@pytest.mark.slow
def test_an_answer_given_twice_counts_once(tmp_path, whole):
    class Twice(Grid):
        def replies(self, server_round, node, answer):
            reply = answer()
            return [reply, reply]

    found, grid = run(tmp_path, Twice)
    assert same_bits(whole.model, found.model)
    assert len(grid.pulled) == len(set(grid.pulled))
    assert [row["bytes_up"] for row in found.rows[1:]] == [row["bytes_up"] for row in whole.rows[1:]]


@pytest.mark.slow
def test_a_node_dies_in_a_round_and_comes_back_as_another(tmp_path):
    """Its process is new and so is its id; it is asked who it is, and sent what it lacks."""

    class Dies(Grid):
        def replies(self, server_round, node, answer):
            if (server_round, node) == (2, BAD):
                self.online.pop(BAD, None)
                return []
            return [answer()]

        def push_messages(self, messages):
            messages = list(messages)
            if messages and messages[0].metadata.group_id == "3":
                self.greeted = sorted(self.online)
            return super().push_messages(messages)

    class Back(Dies):
        def get_node_ids(self):
            if BAD not in self.online:  # the next look finds it again, under another id
                self.online[99] = BAD
            return super().get_node_ids()

    gone, grid = run(tmp_path, Dies, folder="gone")
    assert [row["clients"] for row in gone.rows[1:]] == [["0", "1", "2"]] * 2 + [["0", "2"]]
    assert grid.greeted == [1, 3]
    back, grid = run(tmp_path, Back, folder="back")
    assert [row["clients_ok"] for row in back.rows[1:]] == [3, 2, 3]
    assert back.rows[3]["clients"] == ["0", "1", "2"] and grid.greeted == [1, 3, 99]


class Killed(Grid):
    """Flower finds that client 1 does not send heartbeats any more, in round 2."""

    def replies(self, server_round, node, answer):
        if (server_round, node) != (2, BAD) or self.polls:
            return [answer()]
        self.polls = 1
        del self.online[BAD]
        return [Message(Error(ErrorCode.NODE_UNAVAILABLE, "no heartbeat"), reply_to=reply_to(self, BAD))]


@pytest.mark.parametrize("after", [0, 2])  # looks; at the first it is there again
@pytest.mark.slow
def test_a_killed_node_that_returns_in_time_is_asked_again_and_nothing_is_lost(tmp_path, whole, after):
    class Back(Killed):
        looks = 0

        def get_node_ids(self):
            if BAD not in self.online.values():
                self.looks += 1
                if self.looks > after:
                    self.online[99] = BAD
            return super().get_node_ids()

    found, grid = run(tmp_path, Back, "++runtime.round_timeout=60", "++runtime.node_timeout=60")
    assert 99 in grid.online and same_bits(whole.model, found.model)
    assert all(row["clients_failed"] == 0 for row in found.rows[1:])
    assert found.rows[2]["bytes_down"] > whole.rows[2]["bytes_down"]
    assert found.rows[2]["bytes_up"] == whole.rows[2]["bytes_up"]


class Crashes(Grid):
    """The executor of client 1 is killed over its order, in round 2, so often."""

    times, code = 1, ErrorCode.CLIENT_APP_CRASHED

    def replies(self, server_round, node, answer):
        if (server_round, node) != (2, BAD) or self.polls >= self.times:
            return [answer()]
        self.polls += 1
        return [Message(Error(self.code, "it stopped"), reply_to=reply_to(self, BAD))]


@pytest.mark.parametrize(
    "why",
    [
        pytest.param(ErrorCode.CLIENT_APP_CRASHED, marks=pytest.mark.slow),
        ErrorCode.MESSAGE_UNAVAILABLE,  # its SuperNode was killed while it sent the answer
    ],
)
def test_an_executor_that_was_killed_is_asked_again_and_nothing_is_lost(tmp_path, whole, why):
    class Twice(Crashes):
        times, code = 2, why

    found, _ = run(tmp_path, Twice)
    assert same_bits(whole.model, found.model)
    assert all(row["clients_failed"] == 0 for row in found.rows[1:])


@pytest.mark.slow
def test_an_executor_that_every_order_kills_is_done_without(tmp_path):
    class Always(Crashes):
        times = 100

    found, grid = run(tmp_path, Always)
    assert [row["clients_ok"] for row in found.rows[1:]] == [3, 2, 3] and grid.polls == 3
    assert found.rows[2]["failures"] == ["Client 1 was set aside: it failed: it stopped."]


@pytest.mark.slow
def test_a_killed_node_that_stays_away_is_not_waited_for_for_ever(tmp_path):
    found, _ = run(tmp_path, Killed)
    assert [row["clients_ok"] for row in found.rows[1:]] == [3, 2, 2]
    assert found.rows[2]["failures"] == ["Client 1 was set aside: it failed: no heartbeat."]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no readable hello"),
        ("[" * 100_000, "no readable hello"),
        ('{"name": 5, "num_partitions": null, "held": []}', "without a name"),
        ('{"name": "x", "num_partitions": null, "held": [[]]}', "no list of digests"),
    ],
)
def test_a_hello_that_cannot_be_read_is_asked_for_again(tmp_path, text, reason):
    class Garbage(Grid):
        def replies(self, server_round, node, answer):
            reply = answer()
            self.polls += 1
            if node == BAD and self.polls < 4:  # the first time
                content = RecordDict({"hello": ConfigRecord({"json": text})})
                return [Message(content, reply_to=reply_to(self, node))]
            return [reply]

    grid = Garbage([*SMALL, *ROUNDS])
    membership = connect(grid, {}).membership
    assert membership.greet() == {"0": 1, "2": 3} and reason in membership.refusals[BAD]
    assert membership.greet() == {"0": 1, "1": 2, "2": 3} and not membership.refusals


def reply_to(grid, node):
    return next(message for message in grid.waiting.values() if message.metadata.dst_node_id == node)


def test_a_node_cannot_take_the_name_of_another(tmp_path):
    class Disguised(Grid):
        def replies(self, server_round, node, answer):
            if node == BAD:
                return [hello_reply(reply_to(self, node), Hello("0", 3))]
            return [answer()]

    grid = Disguised([*SMALL, *ROUNDS])
    membership = connect(grid, {}).membership
    assert membership.greet() == {"0": 1, "2": 3}
    assert membership.refusals[BAD] == "it calls itself 0, and so does another node"
    with pytest.raises(UserError, match="it calls itself 0"):
        membership.wait_for(3, timeout=0.1)


class Mute(Grid):
    """One node is connected and never answers a hello."""

    def replies(self, server_round, node, answer):
        return [] if node == BAD else [answer()]


def test_a_mute_node_is_waited_for_once_not_in_every_round(tmp_path):
    grid = Mute([*SMALL, *ROUNDS])
    membership = connect(grid, {}, hello_timeout=0.6).membership
    began = time.monotonic()
    assert membership.greet() == {"0": 1, "2": 3}
    first = time.monotonic() - began
    asked = len(grid.waiting)
    for _ in range(5):
        assert membership.greet() == {"0": 1, "2": 3}
    assert 0.6 <= first < 0.9 and time.monotonic() - began - first < 0.3
    assert len(grid.waiting) == asked  # nor is it asked again and again
    grid.replies = lambda server_round, node, answer: [answer()]
    assert membership.greet() == {"0": 1, "1": 2, "2": 3}  # its answer is taken when it comes


def become_sites(grid, folder, names):
    for context in grid.contexts.values():
        context.node_config.clear()
        context.node_config.update({"site": names[context.node_id], "cache-dir": str(folder)})


def test_a_site_that_is_asked_again_and_again_does_not_make_a_mute_one_waited_for(tmp_path, monkeypatch):
    """One waits for a person's approval and is asked in every round; the other has not said a word."""

    class Undecided(Mute):
        state = WAITING

        def replies(self, server_round, node, answer):
            if node != 3:
                return super().replies(server_round, node, answer)
            self.polls += 1
            return [hello_reply(reply_to(self, node), Hello("west", state=self.state))]

    monkeypatch.setattr("fedfrozen_app.server.membership.WAITING_PAUSE", 0.0)
    grid = Undecided([*SMALL, *ROUNDS])
    become_sites(grid, tmp_path, {1: "north", BAD: "south", 3: "west"})
    membership = connect(grid, {}, hello_timeout=0.6).membership
    assert membership.greet() == {"north": 1} and membership.waiting == {3: "west"}
    began = time.monotonic()
    for _ in range(5):
        assert membership.present() == {"north": 1}
    assert grid.polls == 6 and time.monotonic() - began < 0.3
    told = membership.describe()
    assert "Client west: waiting for a person's approval." in told
    assert f"Node {BAD}: it is connected, and does not answer." in told
    grid.state = ""
    assert membership.present() == {"north": 1, "west": 3} and not membership.waiting


@pytest.mark.slow
def test_the_wait_for_nodes_is_one_wait_and_names_them(tmp_path):
    """`gather` waits for the first node and then for all: together no longer than was said."""
    grid = Mute([*SMALL, *ROUNDS])
    names = {1: "north", BAD: "south", 3: "west", 9: "east"}
    become_sites(grid, tmp_path, names)
    invitation = Invitation(timeout=2.0, version="sources abc")
    last_state = {"south": "answered round 4"}
    membership = Membership(Transport(grid), invitation, sites=names, last_state=last_state)
    began = time.monotonic()
    with pytest.raises(UserError) as told:
        gather(membership, read(resolved(compose_config([*SMALL, "++runtime.node_timeout=2"]))))
    assert 2 <= time.monotonic() - began < 3.8
    text = str(told.value)
    assert "Only 2 of 3 nodes appeared within 2 s" in text
    assert "The site south: it is connected, and does not answer; last seen when it answered round 4." in text
    assert "The site east: not connected." in text and "This server: sources abc." in text
    assert "Node" not in text  # names, not numbers


def test_where_nobody_answers_the_sentence_has_the_number_that_was_asked_for(tmp_path):
    grid = Mute([*SMALL, *ROUNDS])
    grid.online = {BAD: BAD}
    membership = connect(grid, {}, hello_timeout=0.2).membership
    words = [*SMALL, "++runtime.node_timeout=0.2", "++runtime.min_nodes=3"]
    with pytest.raises(UserError, match="Only 0 of 3 nodes"):
        gather(membership, read(resolved(compose_config(words))))


class Refusing(Grid):
    """Every client says no to every order."""

    def replies(self, server_round, node, answer):
        if not server_round:
            return [answer()]
        why = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "the site refused, because it may not")
        return [Message(why, reply_to=reply_to(self, node))]


def test_when_everybody_refuses_the_run_ends(tmp_path):
    with pytest.raises(RunFailed, match=r"No client took part in the last 2 rounds: .*it may not") as ended:
        run(tmp_path, Refusing, "num_rounds=30")
    assert f"continue with `fedfrozen resume {tmp_path / 'run'}`." in str(ended.value)
    found = Run(tmp_path / "run")
    assert [row["round"] for row in found.rows] == [0, 1, 2]
    assert found.summary["status"] == "failed"


@pytest.mark.slow
def test_one_round_without_anybody_is_got_over(tmp_path):
    class Once(Refusing):
        def replies(self, server_round, node, answer):
            return super().replies(server_round, node, answer) if server_round == 2 else [answer()]

    found, _ = run(tmp_path, Once, "num_rounds=4")
    assert [row["clients_ok"] for row in found.rows[1:]] == [3, 0, 3, 3]


@pytest.mark.slow
def test_a_client_that_went_between_rounds_is_waited_for_and_the_bits_are_the_same(tmp_path, whole):
    """As one whose SuperNode was killed: Flower no longer lists it, and then does again."""

    class Gone(Grid):
        away = 0

        def get_node_ids(self):
            if len(self.pulled) >= 3 + 3 and self.away < 3:  # hellos and the first round are over
                self.away += 1
                return [node for node in self.online if node != BAD]
            return super().get_node_ids()

    found, grid = run(tmp_path, Gone, "++runtime.round_timeout=60", "++runtime.node_timeout=20")
    assert grid.away == 3
    assert [row["clients_ok"] for row in found.rows[1:]] == [3, 3, 3]
    assert same_bits(found.model, whole.model)


@pytest.mark.slow
def test_one_that_stays_away_is_done_without_after_one_wait(tmp_path):
    class Lost(Grid):
        def get_node_ids(self):
            lost = len(self.pulled) >= 6
            return [node for node in self.online if not (lost and node == BAD)]

    began = time.monotonic()
    found, _ = run(tmp_path, Lost, "num_rounds=6", "++runtime.node_timeout=1", "++runtime.round_timeout=60")
    assert [row["clients_ok"] for row in found.rows[1:]] == [3, 2, 2, 2, 2, 2]
    waited = [row["seconds"]["total"] for row in found.rows[2:]]
    assert waited[0] >= 1 and max(waited[1:]) < 1, (waited, time.monotonic() - began)
