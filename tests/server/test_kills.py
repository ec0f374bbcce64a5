"""Killed anywhere and resumed: 50 random points at which the process dies, against the unbroken run."""

import random
from contextlib import ExitStack

import pytest

from fedfrozen_app.core.errors import RunFailed
from fedfrozen_app.files import checkpoint, disk
from fedfrozen_app.handlers import train_handler
from fedfrozen_app.server import base
from fedfrozen_app.server.base import PlannedFedAvg
from tests.conftest import full_disk, same_bits
from tests.resuming import Killed

WORDS = ("num_clients=2", "num_rounds=3", "strategy.warmup_rounds=1", "dataset.limit=80", "eval_every=3")
PACED = (*WORDS, "num_clients=3", "clock=profiles", "clock.spread=1", "pacing=buffered", "pacing.buffer=1")
PRIVATE = ("strategy=local", "num_clients=2", "num_rounds=3", "dataset.limit=80", "eval_every=3")


class Reaper:
    """Counts the places at which a process may die, and dies at the chosen one."""

    def __init__(self, monkeypatch) -> None:
        self.count, self.fatal = 0, None
        for owner, name in (
            (PlannedFedAvg, "plan"),  # configure
            (train_handler, "train_client"),  # wait: a client at work
            (train_handler, "train_reply"),  # wait: its reply on the way
            (base, "close_round"),  # aggregated, not yet written
            (checkpoint, "save_tensors"),  # a file of the checkpoint
            (checkpoint, "flush"),  # between its files, before and after the rename
            (disk, "replace_file"),
        ):
            self._watch(monkeypatch, owner, name)

    def _watch(self, monkeypatch, owner, name) -> None:
        real = getattr(owner, name)

        def watched(*args, **kwargs):
            self.count += 1
            if self.count == self.fatal:
                raise Killed
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)


def run_with_kills(train, reaper, words, whole, seed, points):
    """Kill at a random place, resume, and again until it is through; then compare."""
    draw = random.Random(seed)
    for number in range(points):
        folder = f"{seed}-{number}"
        reaper.count, reaper.fatal = 0, draw.randint(1, whole.places)
        resume = False
        deaths = 0
        while True:
            try:
                run = train(*words, folder=folder, resume=resume)
                break
            except Killed:
                deaths += 1
                # Most die once, some twice; a run without a checkpoint begins anew.
                reaper.count = 0
                reaper.fatal = draw.randint(1, whole.places) if deaths == 1 and draw.random() < 0.3 else None
                resume = bool(checkpoint.numbers(run_folder(train, folder) / "checkpoints"))
        assert deaths >= 1
        assert same_bits(whole.model, run.model), (seed, number, reaper.fatal)
        assert [row["round"] for row in run.rows] == [0, 1, 2, 3]
        for row, twin in zip(run.rows, whole.rows, strict=True):
            for key in ("clients", "clients_ok", "bytes_up", "bytes_down", "test_accuracy", "train_loss"):
                assert row.get(key) == twin.get(key), (key, row["round"])


def run_folder(train, folder):
    return train.__closure__[[*train.__code__.co_freevars].index("tmp_path")].cell_contents / folder


@pytest.mark.parametrize("size", [0, 10_000], ids=["no room", "room for half a model"])
@pytest.mark.slow
def test_a_full_disk_ends_with_a_sentence_and_goes_on_when_there_is_room(train, monkeypatch, size):
    whole = train(*WORDS, folder="whole")
    real = checkpoint.write
    room = ExitStack()

    def full(state, *more, **settings):
        if state.round == 2:  # and from then on
            room.enter_context(full_disk(size))
        return real(state, *more, **settings)

    monkeypatch.setattr(checkpoint, "write", full)
    with room, pytest.raises(RunFailed, match=r"File too large.*: make room there.*fedfrozen resume"):
        train(*WORDS, folder="full")
    folder = run_folder(train, "full")
    assert checkpoint.numbers(folder / "checkpoints") == [1]
    assert not [path for path in folder.rglob("*") if path.name.endswith(".part")]
    monkeypatch.setattr(checkpoint, "write", real)
    assert same_bits(whole.model, train(*WORDS, folder="full", resume=True).model)


@pytest.mark.parametrize(
    ("words", "seed", "points"),
    [
        pytest.param(WORDS, 0, 6, id="slice"),
        pytest.param(PRIVATE, 1, 2, id="private slice", marks=pytest.mark.slow),
        pytest.param(WORDS, 2, 30, id="fedfrozen", marks=pytest.mark.slow),
        pytest.param(PRIVATE, 3, 20, id="private", marks=pytest.mark.slow),
        pytest.param(PACED, 4, 12, id="paced", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_killed_anywhere_it_goes_on_to_the_same_model(train, monkeypatch, words, seed, points):
    reaper = Reaper(monkeypatch)
    whole = train(*words, folder="whole")
    whole.places = reaper.count
    assert whole.places > 15
    run_with_kills(train, reaper, words, whole, seed, points)
