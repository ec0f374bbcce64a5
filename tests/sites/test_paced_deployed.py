"""Pacing over three real sites, one of them ten times slower: who waits for whom, kills, and budgets."""

import os
import signal
import time
from pathlib import Path

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.files import lease
from fedfrozen_app.server.live_round import LiveRound
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.sign import last_sign
from tests.conftest import Run
from tests.sites.federation import ROOT, SITES, Deployment, federation
from tests.sites.independent_budget import check_budget
from tests.sites.inprocess import SiteGrid, Sites
from tests.sites.processes import wait_until
from tests.sites.test_bad_days import start, wait_for_rows
from tests.sites.twin import join, largest_difference, the_same_in_process, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
HOOK = Path(__file__).parent / "slowed"
SLOW, DELAY = "west", 10.0  # seconds longer than the others, which take about one
COMMON = ("num_rounds=8", "strategy.warmup_rounds=3", "runtime.min_nodes=3", "runtime.node_timeout=600")
PACINGS = {
    "buffered": ("pacing=buffered", "pacing.concurrency=3", "pacing.buffer=2"),
    "deadline": ("pacing=deadline", "pacing.seconds=4"),
}
STEPS = 2
PRIVATE = (
    *("strategy=fedavg", "num_rounds=10", "runtime.min_nodes=3", "runtime.node_timeout=600"),
    *("privacy=dp_sgd", "privacy.epsilon=3", "privacy.delta=1e-5", "privacy.accountant=rdp"),
    *(f"client.local_steps={STEPS}", "client.batch_size=8", "runtime.round_timeout=600"),
)


def slow_down(monkeypatch) -> None:
    """The slow site's executor starts with the hook."""
    begin = Deployment.start

    def started(one: Deployment, party: str, script: str, *within: str) -> int:
        if (party, script) == (SLOW, "executor"):
            within = ("env", f"PYTHONPATH={HOOK}:{ROOT}", f"SLOWED={DELAY}", *within)
        return begin(one, party, script, *within)

    monkeypatch.setattr(Deployment, "start", started)


class InOrder(SiteGrid):
    """Sites reply in the rounds in which they did in another run."""

    rows: list
    round = 0

    def pull_messages(self, message_ids):
        (message_id,) = message_ids
        message = self.waiting[message_id]
        if message.metadata.message_type == "train":
            name = self.executors[message.metadata.dst_node_id - 1].kit.name
            found = self.rows[self.round]["pacing"]
            if [name, self.round - int(message.metadata.group_id)] not in found["used"] + found["dropped"]:
                return []
        return super().pull_messages(message_ids)


def replayed(run: Run, deployment: Deployment, folder: Path, monkeypatch, *more: str) -> Run:
    """The same run over copies of the kits, in this process and in the order of that run."""
    folder.mkdir()
    InOrder.rows, free, train = run.rows, LiveRound._free, Sites.train

    def asked_then(self):
        InOrder.round = self.number
        return [client for client in free(self) if client in run.rows[self.number]["pacing"]["asked"]]

    monkeypatch.setattr(LiveRound, "_free", asked_then)
    monkeypatch.setattr(Sites, "train", lambda self, *w, **k: train(self, *w, make_grid=InOrder, **k))
    return the_same_in_process(deployment, SITES, folder, *more)


def wait_until_idle(deployment: Deployment) -> None:
    """A site that is at work when the run ends finishes what it has paid for."""

    def idle(site: str) -> bool:
        sign = last_sign(deployment.kits / site / "run", "executor")
        return sign is not None and sign.state == "waiting"

    time.sleep(1)
    wait_until(lambda: all(map(idle, SITES)), patience=120)


@pytest.mark.parametrize("pacing", PACINGS)
def test_a_slow_site_holds_nobody_up_and_its_reply_counts_late(tmp_path, monkeypatch, pacing):
    slow_down(monkeypatch)
    more = (*COMMON, *PACINGS[pacing])
    with federation(tmp_path / "fed", SITES) as deployment:
        join(deployment, SITES)
        assert command(words(deployment, tmp_path / "run", *more)) == 0
        run = Run(tmp_path / "run")
        ages = {(client, age) for row in run.rows[1:] for client, age in row["pacing"]["used"]}
        assert any(client == SLOW and age for client, age in ages), "the slow site is never late"
        assert all(row["clients_failed"] == 0 for row in run.rows[1:])
        assert [row["round"] for row in run.rows] == list(range(9))
        quick = [row for row in run.rows[2:] if SLOW in row["pacing"]["at_work"]]
        assert quick and min(row["seconds"]["total"] for row in quick) < DELAY
        twin = replayed(run, deployment, tmp_path / "twin", monkeypatch, *more)
    for row, again in zip(run.rows[1:], twin.rows[1:], strict=True):
        assert row["pacing"] == again["pacing"], row["round"]
    assert largest_difference(run, twin) <= 1e-6


def test_killed_parties_lose_nothing_and_pay_once(tmp_path, monkeypatch):
    """Server, executor and SuperNode are killed while requests of a private run are at work."""
    slow_down(monkeypatch)
    folder = tmp_path / "run"
    with federation(tmp_path / "fed", SITES) as deployment:
        join(deployment, SITES)
        for site in SITES:
            deployment.change(site, "policy.yaml", strategies=["fedavg"])
        line = words(deployment, folder, *PRIVATE, *PACINGS["buffered"])
        training = start(*[word for word in line if word != "runtime.round_timeout=120"])
        for rows in (3, 5):
            wait_for_rows(folder, rows, training, timeout=600)
            owner = lease.holder(folder)
            assert owner is not None
            os.kill(owner.pid, signal.SIGKILL)
            training.communicate(timeout=300)
            training = start("resume", str(folder))
        wait_for_rows(folder, 6, training, timeout=600)
        for site, part in (("north", "executor"), ("south", "supernode"), (SLOW, "executor")):
            sign = last_sign(deployment.kits / site / "run", part)
            assert sign is not None
            os.kill(sign.pid, signal.SIGKILL)
        output, _ = training.communicate(timeout=1800)
        assert training.returncode == 0, output
        run = Run(folder)
        assert [row["round"] for row in run.rows] == list(range(11))
        assert all(row["clients_failed"] == 0 for row in run.rows[1:]), [r.get("failures") for r in run.rows]
        spent = {}
        for row in run.rows[1:]:
            spent |= row["epsilon"]
        at_work = run.rows[-1]["pacing"]["at_work"]
        wait_until_idle(deployment)
        for site in SITES:
            own = check_budget(Kit.read(deployment.kits / site), STEPS)
            # What a site trains for after its last reply came, it pays for too.
            assert spent[site] <= own * 1.01 and (site in at_work or spent[site] >= own * 0.99)
