"""Buffered pacing over three real sites, each party killed (SIGKILL) in each phase: `pytest -m slow`.

TLS, SuperLink, nginx, SuperNodes, executors. The sites' processes are killed in all 13 states of a train
request, the run's ServerApp in each phase of a round, the SuperLink while requests are at work. Every run
must end; each request is trained and paid for once, and its reply used once.
"""

import json
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.request_states import State
from tests.conftest import Run
from tests.sites.federation import ROOT, SITES, Deployment, federation
from tests.sites.independent_budget import budget_of, epsilon_of_requests, requests_trained
from tests.sites.test_bad_days import start, wait_for_rows
from tests.sites.test_killed_sites import (
    PASSED,
    TRAINING,
    Victims,
    check_charges,
    check_log,
    check_no_secret,
    set_policies,
    trained,
)
from tests.sites.test_paced_deployed import replayed, wait_until_idle
from tests.sites.twin import join, largest_difference, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
SERVER_HOOK = Path(__file__).parent / "killed_server"
STEPS = 2  # of a request
EPSILON = (
    1  # its best order is a whole number, at which two accountants of Rényi privacy agree to the last digits
)
BUFFERED = ("pacing=buffered", "pacing.concurrency=3", "pacing.buffer=2", "checkpoint.every=1")
PATIENCE = ("runtime.min_nodes=3", "runtime.node_timeout=900", "runtime.round_timeout=900", "eval_every=50")
PRIVATE = (
    *("privacy=dp_sgd", f"privacy.epsilon={EPSILON}", "privacy.delta=1e-5", "privacy.accountant=rdp"),
    *(f"client.local_steps={STEPS}", "client.batch_size=8"),
)
# Each site's own requests, in their order: all 13 states, two of them twice.
IN_ORDER = {
    "north": [State.CHARGED, State.RECEIVED, State.CHECKED, State.APPROVED, State.SENT],
    "south": [State.PREPARED, State.ADMITTED, State.TRAINED, State.NOISED, State.LOGGED],
    "west": ["storing", State.STORED, State.MASKED, State.TRAINED, State.SENT],
}
# By ServerApp: the phase in which it is killed, at which of its passages in that process.
SERVER_KILLS = (
    *(("reply", 3), ("request", 3), ("asked", 3), ("sent", 2), ("sum", 2), ("step", 2), ("tensors", 2)),
    *(("flush", 4), ("reply", 1), ("sent", 1), ("step", 1), ("file", 9)),
)
PLAIN_SITES = {
    "north": [State.PREPARED, State.STORED],
    "south": [State.TRAINED, State.SENT],
    "west": [State.RECEIVED, State.LOGGED],
}
PLAIN_SERVER = (("reply", 7), ("sent", 2), ("step", 1))


@dataclass
class PacedVictims(Victims):
    """Sites that are killed in their own requests, one after another."""

    def settle(self) -> int:
        """Every kill has happened; `plans` by round from now on. How many there were."""
        found = 0
        for site, states in self.plans.items():
            copies = [path.name.partition("-") for path in self.marks(site).iterdir() if path.is_dir()]
            by_round = {number: state for number, _, state in copies}
            assert len(by_round) == len(copies)
            assert Counter(by_round.values()) == Counter(map(str, states)), (site, by_round)
            self.plans[site] = by_round
            found += len(copies)
        return found


def kill_server(monkeypatch, marks: Path, kills) -> None:
    """Its SuperExec starts ServerApps with the hook."""
    marks.mkdir()
    begin = Deployment.start

    def started(one: Deployment, party: str, script: str, *within: str) -> int:
        if (party, script) == ("server", "superexec"):
            plan = json.dumps({"kills": kills, "marks": str(marks)})
            within = ("env", f"PYTHONPATH={SERVER_HOOK}:{ROOT}", f"KILLED_SERVER={plan}", *within)
        return begin(one, party, script, *within)

    monkeypatch.setattr(Deployment, "start", started)


def resumed_until(training: subprocess.Popen, folder: Path, marks: Path, kills: int) -> subprocess.Popen:
    """Resume after each of so many kills of the ServerApp; the last attempt, which goes on."""
    for number in range(1, kills + 1):
        output, _ = training.communicate(timeout=1800)
        found = sorted(path.name for path in marks.iterdir())
        assert training.returncode != 0 and len(found) == number, (found, output)
        training = start("resume", str(folder))
    return training


def finish(training: subprocess.Popen) -> None:
    output, _ = training.communicate(timeout=1800)
    assert training.returncode == 0, output


def kill_superlink(deployment: Deployment, training: subprocess.Popen, folder: Path) -> subprocess.Popen:
    """While requests are at work. It starts again, with its database; the run goes on, or is resumed."""
    wait_for_rows(folder, len(Run(folder).rows) + 1, training, timeout=600)
    deployment.kill("server-superlink")
    deployment.start("server", "superlink")
    deployment.wait_for_line("server-superlink", "Application startup complete")
    output, _ = training.communicate(timeout=1800)
    assert "Traceback" not in output, output
    return training if training.returncode == 0 else start("resume", str(folder))


def check_replies(run: Run, deployment: Deployment, rounds: int) -> dict[str, list[int]]:
    """By site the versions whose replies came: each once, and all that the site has trained for but the one
    that it is at work on at the end."""
    assert [row["round"] for row in run.rows] == list(range(rounds + 1))
    assert all(row["clients_failed"] == 0 for row in run.rows[1:]), [row.get("failures") for row in run.rows]
    assert not any(row["pacing"]["dropped"] or row["pacing"].get("given_up") for row in run.rows[1:])
    assert all(len(row["pacing"]["used"]) >= 2 for row in run.rows[1:])
    used: dict[str, list[int]] = {site: [] for site in SITES}
    for row in run.rows[1:]:
        for site, age in row["pacing"]["used"]:
            used[site].append(row["round"] - age)
    for site, versions in used.items():
        assert versions == sorted(set(versions)), f"a reply of {site} counts twice"
        fresh = requests_trained(Kit.read(deployment.kits / site))
        at_work = site in run.rows[-1]["pacing"]["at_work"]
        assert versions == fresh[: len(versions)] and len(fresh) - len(versions) <= at_work, (site, fresh)
        check_log(deployment.kits / site, rounds)
    return used


def check_epsilon(run: Run, deployment: Deployment, used: dict[str, list[int]]) -> None:
    """What the summary says is what an accountant of Google's makes of the requests that were answered; the
    site's own records count each request that it trained for once."""
    spent = run.summary["epsilon"]
    assert sorted(spent) == sorted(SITES)
    for site in SITES:
        kit = Kit.read(deployment.kits / site)
        budget = budget_of(kit)
        fresh = len(requests_trained(kit))
        assert budget.rounds == fresh and sum(step.times for step in budget.steps) == STEPS * fresh
        exact = epsilon_of_requests(kit, STEPS, len(used[site]))
        assert spent[site] == pytest.approx(exact, rel=1e-6, abs=1e-6), site
        assert 0 < epsilon_of_requests(kit, STEPS) <= EPSILON


def note(deployment: Deployment, text: str) -> None:
    """For who reads the output of `pytest -s`."""
    print(f"\n{text}")
    (deployment.folder / "kills.txt").write_text(text)


@pytest.mark.parametrize("victim", ["executor", "supernode"])
def test_sites_are_killed_in_each_state(tmp_path, monkeypatch, victim):
    assert {state for states in IN_ORDER.values() for state in states} == set(PASSED)
    victims, rounds = PacedVictims(tmp_path, victim, dict(IN_ORDER)), 12
    victims.prepare(monkeypatch)
    with federation(tmp_path / "fed", SITES) as deployment:
        set_policies(deployment)
        join(deployment, SITES)
        run = trained(deployment, tmp_path / "run", f"num_rounds={rounds}", *PATIENCE, *BUFFERED, *PRIVATE)
        wait_until_idle(deployment)
        note(deployment, f"{victims.settle()} kills of {victim}s")
        used = check_replies(run, deployment, rounds)
        check_epsilon(run, deployment, used)
        for site in SITES:
            kit = deployment.kits / site
            check_charges(victims, site, kit, set(requests_trained(Kit.read(kit))), epsilon=EPSILON)
            check_no_secret(victims, site, kit)


def test_the_server_is_killed_in_each_phase(tmp_path, monkeypatch):
    folder, marks, rounds = tmp_path / "run", tmp_path / "server-marks", 40
    kill_server(monkeypatch, marks, SERVER_KILLS)
    with federation(tmp_path / "fed", SITES) as deployment:
        set_policies(deployment)
        join(deployment, SITES)
        more = (f"num_rounds={rounds}", *PATIENCE, *BUFFERED, *PRIVATE)
        line = [w for w in words(deployment, folder, *TRAINING, *more) if "model.config" not in w]
        training = resumed_until(start(*line), folder, marks, len(SERVER_KILLS))
        finish(kill_superlink(deployment, training, folder))
        wait_until_idle(deployment)
        found = sorted(path.name for path in marks.iterdir())
        note(deployment, f"{len(found)} kills of the ServerApp, one of the SuperLink: {found}")
        used = check_replies(Run(folder), deployment, rounds)
        check_epsilon(Run(folder), deployment, used)


def test_a_plain_run_with_kills_replays_in_one_process(tmp_path, monkeypatch):
    """Executors and the server are killed; the order of arrival that the rows hold gives the same model."""
    folder, marks, rounds = tmp_path / "run", tmp_path / "server-marks", 10
    victims = PacedVictims(tmp_path, "executor", dict(PLAIN_SITES))
    victims.prepare(monkeypatch)
    kill_server(monkeypatch, marks, PLAIN_SERVER)
    more = (f"num_rounds={rounds}", "strategy.warmup_rounds=4", *PATIENCE[:2], *BUFFERED)
    with federation(tmp_path / "fed", SITES) as deployment:
        join(deployment, SITES)
        line = words(deployment, folder, *more, "runtime.round_timeout=900")
        finish(resumed_until(start(*line), folder, marks, len(PLAIN_SERVER)))
        wait_until_idle(deployment)
        note(deployment, f"{victims.settle()} kills of executors, {len(PLAIN_SERVER)} of the server")
        run = Run(folder)
        check_replies(run, deployment, rounds)
        twin = replayed(run, deployment, tmp_path / "twin", monkeypatch, *more)
    for row, again in zip(run.rows[1:], twin.rows[1:], strict=True):
        assert row["pacing"]["used"] == again["pacing"]["used"], row["round"]
    assert largest_difference(run, twin) <= 1e-6
