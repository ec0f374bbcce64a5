"""kill -9 of the process in each phase of runs under buffered pacing: resumed, they have the unbroken run's
bits, and epsilon is what an independent accountant makes of the requests that each client got."""

import json
import os
import random
import signal
from collections import Counter

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import RDPAccountant as OpacusRdp

from fedfrozen_app.files import checkpoint, disk
from fedfrozen_app.handlers import train_handler
from fedfrozen_app.privacy.budget import BudgetFile
from fedfrozen_app.server import base
from fedfrozen_app.server.base import PlannedFedAvg
from tests.conftest import Run, same_bits
from tests.resuming import without_times

PHASES = {
    "ask": (PlannedFedAvg, "plan"),
    "train": (train_handler, "train_client"),
    "reply": (train_handler, "train_reply"),
    "step": (base, "close_round"),
    "checkpoint": (checkpoint, "save_tensors"),
    "flush": (checkpoint, "flush"),
    "files": (disk, "replace_file"),
}
CLOCK = ("clock=profiles", "clock.uplink=1", "clock.spread=1", "dataset.limit=120", "num_rounds=5")
PLAIN = (*CLOCK, "num_clients=3", "pacing=buffered", "pacing.buffer=1", "strategy.warmup_rounds=2")
PRIVATE = (
    *(*CLOCK, "num_clients=3", "pacing=buffered", "pacing.buffer=1", "strategy=fedavg", "privacy=dp_sgd"),
    *("privacy.epsilon=8", "privacy.accountant=rdp", "privacy.seeded_noise=true", "client.local_steps=2"),
    "client.batch_size=4",
)
MASKED = (
    *(*CLOCK, "num_clients=5", "strategy=fedavg", "secure_aggregation=on", "pacing=buffered"),
    *("secure_aggregation.min_cohort=2", "pacing.concurrency=4", "pacing.buffer=2"),
)
STEPS = 2  # of a private client's request


def in_process(work):
    """Run it in a process of its own; the signal that ended it, or 0."""
    if not (pid := os.fork()):
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001  (the test's own machinery must not run twice)
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def watched(counts, fatal):
    """Count the passages of each phase; die at the one that is fatal."""

    def watch(phase, real):
        def passing(*args, **keys):
            counts[phase] += 1
            if (phase, counts[phase]) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **keys)

        return passing

    for phase, (owner, name) in PHASES.items():
        setattr(owner, name, watch(phase, getattr(owner, name)))


def plain_row(row):
    row = without_times(row)
    return {**row, "secure": {**row["secure"], "seconds": {}}} if "secure" in row else row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "seed", "kills"),
    [
        pytest.param(PLAIN, 0, 14, id="fedfrozen"),
        pytest.param(PRIVATE, 1, 14, id="private"),
        pytest.param(MASKED, 2, 12, id="masked"),
    ],
)
def test_killed_in_any_phase_it_goes_on_to_the_same_bits(train, tmp_path, words, seed, kills):
    def start(folder, fatal=None, resume=False):
        counts = Counter()
        watched(counts, fatal)
        train(*words, folder=folder, resume=resume)
        (tmp_path / f"{folder}.json").write_text(json.dumps(counts))

    assert in_process(lambda: start("whole")) == 0
    whole, draw = Run(tmp_path / "whole"), random.Random(seed)
    counts = json.loads((tmp_path / "whole.json").read_text())
    phases = [phase for phase in PHASES if counts.get(phase)]
    assert len(phases) >= 5 and any(row["staleness_max"] for row in whole.rows[1:])
    for number in range(kills):
        phase, folder = phases[number % len(phases)], str(number)
        fatal = phase, draw.randint(1, counts[phase])
        assert in_process(lambda f=folder, x=fatal: start(f, x)) == signal.SIGKILL, fatal
        kept = bool(checkpoint.numbers(tmp_path / folder / "checkpoints"))  # without one it begins anew
        assert in_process(lambda f=folder, k=kept: start(f, resume=k)) == 0
        resumed = Run(tmp_path / folder)
        assert same_bits(whole.model, resumed.model), fatal
        assert list(map(plain_row, resumed.rows)) == list(map(plain_row, whole.rows)), fatal
        if words is PRIVATE:
            check_epsilon(resumed)


def check_epsilon(run):
    spent = {}
    for row in run.rows[1:]:
        spent |= row["epsilon"]
    for client, epsilon in spent.items():
        asked = sum(client in row["virtual_by_client"] for row in run.rows[1:])
        budget = BudgetFile(run.folder / "privacy", client).read()
        (paid,) = {(step.noise, step.rate) for step in budget.steps}
        assert budget.rounds == asked and sum(step.times for step in budget.steps) == STEPS * asked
        accountant = RdpAccountant(OpacusRdp.DEFAULT_ALPHAS)
        event = PoissonSampledDpEvent(paid[1], GaussianDpEvent(paid[0]))
        accountant.compose(SelfComposedDpEvent(event, STEPS * asked))
        assert epsilon == pytest.approx(accountant.get_epsilon(budget.delta), rel=0.01)
