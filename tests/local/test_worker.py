"""One worker for many runs: what stays loaded and compiled must not show in what comes out."""

import pytest
import torch

from fedfrozen_app.config import compose_run
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process
from tests.conftest import SMALL, Run, same_bits


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
@pytest.mark.slow
def test_a_worker_serves_run_after_run_as_a_new_one_would(train, tmp_path, runner):
    words = [*SMALL, f"runtime.runner={runner}", "client=sgd", "strategy.warmup_rounds=1"]
    fresh = train(*words, "seed=1", "partition.alpha=1.0", folder="fresh")

    def again(folder, worker, *more):
        composed = compose_run([*words, *more])
        config = composed.config
        corpus = load_corpus(config)
        kept = worker or Worker(config, corpus, shares=share_out(corpus, config, config.num_clients))
        run_in_process(Job(composed, tmp_path / folder), worker=kept)
        return kept

    kept = again("first", None)
    again("second", kept, "seed=1", "partition.alpha=1.0")
    second = Run(tmp_path / "second").model
    # The cohort runner keeps its compiled step, and with it how many clients it stacks: other rounding.
    assert runner == "cohort" or same_bits(fresh.model, second)
    for name, value in fresh.model.items():
        torch.testing.assert_close(second[name], value, rtol=1e-4, atol=1e-6)
    assert not same_bits(fresh.model, Run(tmp_path / "first").model)
    quicker = train(*words, "client.lr=0.1", folder="quicker").model  # a step is given its rate every round
    again("third", kept, "client.lr=0.1")
    for name, value in quicker.items():
        torch.testing.assert_close(Run(tmp_path / "third").model[name], value, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="cannot switch to"):
        again("fourth", kept, "client.batch_size=8")
