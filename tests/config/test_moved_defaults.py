"""A default that has moved does not change a run that began before: it goes on as what it was."""

import shutil
from copy import deepcopy
from pathlib import Path

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.config import compose_run, named_settings, read
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.run.job import Job, checked_settings
from fedfrozen_app.run.stored_config import as_it_was
from fedfrozen_app.server import warmup
from tests.conftest import Run

WORDS = ["num_rounds=10", "dataset.keep_classes=[a,b]"]


def kept(words):
    """What a run of these words writes down of its configuration."""
    return Job(compose_run(words), Path()).with_settings().resolved_config | {"num_clients": 4}


def test_where_nothing_has_moved_nothing_is_said():
    assert as_it_was(WORDS, kept(WORDS)).overrides == WORDS


def test_what_has_moved_is_held():
    had = deepcopy(kept(WORDS))
    had["strategy"]["warmup_rounds"] = 2
    had["model"]["config"]["patch_size"] = 2
    had["client"]["lr_schedule"] = "linear"
    del had["runtime"]["stack_runs"]  # a key that is new since then has today's default
    words = as_it_was(WORDS, had).overrides
    assert words[:2] == WORDS and len(words) == 5
    again = kept(words)
    assert again["runtime"].pop("stack_runs") and again == had
    longer = kept([*words, "num_rounds=50", "strategy.warmup_rounds=7"])
    assert longer["strategy"]["warmup_rounds"] == 7  # whoever says so is obeyed


def test_files_that_have_moved_since_and_another_machine_are_no_reason_to_refuse(tmp_path):
    """Words that come later may say where they are: only what then runs must be there."""
    words = ["dataset=text", f"dataset.path={tmp_path}/gone.csv", "device=cuda"]
    composed = compose_run(words)
    with pytest.raises(UserError, match=r"device=cuda|gone.csv does not exist"):
        read(composed.resolved)
    had = composed.resolved | checked_settings(read(composed.resolved, here=False))
    assert as_it_was(words, had).overrides == words


@pytest.mark.slow
def test_a_resumed_run_and_its_model_are_what_they_were(train, monkeypatch):
    """When it began, a warm-up took a fifth of the rounds; of five that is one, and half of five are two."""
    usual = ["num_rounds=5", "checkpoint.keep=5"]
    with monkeypatch.context() as then:
        then.setattr(warmup, "SHARES", {"warmup_rounds": 0.2, "warmup_minimum": 0.1})
        named_settings._checked.cache_clear()
        run = train(*usual)
    named_settings._checked.cache_clear()
    stages = [row["stage"] for row in run.rows]
    assert stages == ["initial", "warmup", *4 * ["frozen"]]
    assert [row["stage"] for row in train(*usual, folder="today").rows] != stages
    for number in (3, 4, 5):
        shutil.rmtree(run.folder / "checkpoints" / str(number))
    assert command(["resume", str(run.folder)]) == 0
    assert [row["stage"] for row in Run(run.folder).rows] == stages
    assert command(["evaluate", str(run.folder)]) == 0
