"""Noise in the sum: one sigma for the run, and a real epsilon that is at most the claimed one."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedfrozen_app.privacy.budget import BudgetFile
from fedfrozen_app.privacy.sum_noise import SumNoise
from fedfrozen_app.secure import work
from fedfrozen_app.secure.bounds import most_colluders
from fedfrozen_app.secure.roster import Terms
from fedfrozen_app.server.federation import Federation
from tests.conftest import Run
from tests.secure.attacks import attack
from tests.secure.runs import PLAIN
from tests.secure.test_noise_in_sum import ON, SGD

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import sum_epsilon as benchmark

SOME = ("participation=0.5", "num_clients=6", "num_rounds=3", "privacy.epsilon=4")
WORDS = (*ON, *SGD, *SOME, "secure_aggregation.max_examples=200", "strategy=fedavg")


def test_colluders_are_fewer_than_a_third_and_cannot_confirm_two_sums():
    """Two lists of survivors with `needed` signatures each have `2 · needed - count` signers in common, and
    an honest client signs once: that many colluders are needed for a second list."""
    for threshold in (0.5, 2 / 3, 0.8, 1.0):
        terms = Terms("s", "o", 1, threshold, None)
        for count in range(2, 200):
            few = most_colluders(count, threshold)
            assert 0 <= few < max(1, count / 3) and few < 2 * terms.needed(count) - count
    assert [most_colluders(count, 2 / 3) for count in (3, 4, 10, 100)] == [0, 1, 3, 33]


def within_claim(setup):
    real = benchmark.real_epsilon(setup)
    assert max(real[name] for name in ("all stay", "threshold", "colluders", "hostile")) <= setup.epsilon
    assert real["hostile"] > 0.85 * setup.epsilon  # and no more noise than that takes
    return real


def test_the_real_epsilon_is_at_most_the_claimed_one(monkeypatch):
    """By dp-accounting; with a threshold of 1, and with drop-outs down to the default. Shares that follow
    each client's own participations are too small."""
    monkeypatch.setattr(benchmark, "GRID", 2e-3)
    assert within_claim(benchmark.SETUPS[0])["before"] == pytest.approx(4.305, abs=0.01)
    assert within_claim(benchmark.SETUPS[1])["before"] == pytest.approx(4.373, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("setup", benchmark.SETUPS)
def test_in_every_set_up(setup):
    within_claim(setup)


@pytest.fixture
def shares(monkeypatch):
    """The standard deviations with which clients draw their shares."""
    found = []
    draw = work.discrete_gaussian

    def recorded(count, std, words):
        found.append(std)
        return draw(count, std, words)

    monkeypatch.setattr(work, "discrete_gaussian", recorded)
    return found


def expected_share(run: Run) -> float:
    """By hand, for cohorts of three: all must stay, and none colludes."""
    size = sum(value.numel() for value in run.model.values())
    scale = ((2**31 - 1) * 0.75 - 3) / (3 * 200)
    return SumNoise(4.0, 1e-5, 3).multiplier * (0.5 * scale + math.sqrt(size)) / math.sqrt(3)


def test_all_clients_of_a_run_add_the_same_share(train, shares):
    """Although they take part in one round, two or three; and the row says for which sums it suffices."""
    run = train(*WORDS)
    drawn = [name for row in run.rows[1:] for name in row["epsilon"]]
    assert len({drawn.count(name) for name in drawn}) > 1
    assert len(shares) == 9 and shares == pytest.approx([expected_share(run)] * 9, rel=1e-9)
    assert run.rows[1]["secure"]["noise"] == {"survivors": 3, "colluders": 0}
    assert run.rows[-1]["epsilon_max"] <= 4


def test_what_a_server_says_of_participations_changes_no_share(train, shares, monkeypatch):
    """Nor does an older record of the client, or one with another delta."""
    monkeypatch.setattr(Federation, "participations", lambda self, names, rounds: dict.fromkeys(names, 1))
    read = BudgetFile.read

    def older(self):
        budget = read(self)
        return None if budget is None else replace(budget, noise=0.1)

    monkeypatch.setattr(BudgetFile, "read", older)
    run = train(*WORDS, "participation=1", "num_clients=3")
    assert len(shares) == 9 and shares == pytest.approx([expected_share(run)] * 9, rel=1e-9)


def test_a_sum_over_sites_of_several_proposals_is_refused(sites):
    """A server could give the others a proposal with less noise: the request names the one of all."""

    def tampers(grid, step, site, text):
        if step == "order":
            found = json.loads(text)
            found["masking"]["proposal"] = "0" * 64
            return json.dumps(found, separators=(",", ":"))
        return text

    words = ("secure_aggregation=on", "num_rounds=1", "strategy.warmup_rounds=1", *PLAIN)
    reasons, events, _ = attack(sites, tampers, *words)
    assert all("of another proposal than the one that it accepted" in found[-1] for found in reasons.values())
    assert "sent" not in events
