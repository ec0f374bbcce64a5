"""Nodes of Flower that take real time: who holds up whom, and the same bits in virtual time replayed."""

from dataclasses import dataclass, field

from fedfrozen_app.run import virtual_time
from fedfrozen_app.server.pacer import ClosedRound, Pacer
from tests.conftest import same_bits
from tests.server.test_unreliable import BAD, Grid, run

BUFFERED = ("runtime=flower", "pacing=buffered", "pacing.concurrency=3", "pacing.buffer=2")
PATIENT = ("++runtime.round_timeout=30", "++runtime.node_timeout=5", "num_rounds=5")


def slow(polls):
    """Client 1 answers so many looks later than the others."""

    class Slow(Grid):
        def replies(self, server_round, node, answer):
            if node != BAD:
                return [answer()]
            self.polls += 1
            return [answer()] if self.polls % (polls + 1) == 0 else []

    return Slow


@dataclass
class Replay(Pacer):
    """Asks and takes replies as the rows of another run say."""

    rows: list = field(default_factory=list)

    def run_round(self, number, population, ask):
        found = self.rows[number]["pacing"]
        closed = ClosedRound(asked=list(ask(found["asked"], self.now)))
        fresh, late = {one.client: one for one in closed.asked}, self.at_work
        self.at_work = late | fresh  # whose late reply is in may have been asked again since
        for kind in ("used", "dropped"):
            for client, age in found[kind]:
                one = (late if age else fresh)[client]
                getattr(closed, kind).append(one)
                if self.at_work[client] is one:
                    del self.at_work[client]
        assert sorted(self.at_work) == sorted(found["at_work"])
        return closed

    def most_requests(self, rounds):
        return rounds


def replayed(train, monkeypatch, live, *words):
    def make(config, seed, participation, **keys):
        return Replay(config, seed, participation, rows=live.rows)

    monkeypatch.setattr(virtual_time, "make_pacer", make)
    return train("clock=profiles", "pacing=buffered", *words, folder="replayed")


def test_a_slow_node_holds_nobody_up_and_its_reply_counts_late(tmp_path, train, monkeypatch):
    live, _ = run(tmp_path, slow(polls=2), *PATIENT, *BUFFERED)
    ages = {(client, age) for row in live.rows[1:] for client, age in row["pacing"]["used"]}
    assert "1" in {client for client, age in ages if age}, "the slow node is never late"
    # Who is quick is late too where the slow one's reply fills the buffer before it.
    assert {client for client, _ in ages} == {"0", "1", "2"} and len(live.rows) == 6
    assert all(len(row["pacing"]["used"]) == 2 and row["clients_failed"] == 0 for row in live.rows[1:])
    # The same order of arrival in one process and virtual time gives the same bits.
    same = replayed(train, monkeypatch, live, "strategy.warmup_rounds=1", "num_rounds=5")
    assert same_bits(live.model, same.model)
    for one, other in zip(live.rows[1:], same.rows[1:], strict=True):
        for key in ("clients", "train_loss", "staleness_mean", "bytes_up", "test_accuracy"):
            assert one[key] == other[key], key
