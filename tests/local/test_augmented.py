"""Runs whose training images are shifted and flipped: the same in every runner, and not in evaluation."""

import pytest
import torch

from fedfrozen_app.data import augment
from fedfrozen_app.local import client_data
from tests.conftest import same_bits, slowly
from tests.local.runners import RUNNERS, THREE_ROUNDS, compare
from tests.resuming import resumed_and_whole
from tests.runtimes.inprocess.concurrent import same

CROPS = "dataset.augment=crop_flip"
SHORT = ("num_rounds=1", "client.local_steps=2")
TINY = ("num_clients=2", "dataset.limit=60", "partition=iid", "client.local_epochs=1", *THREE_ROUNDS)


@pytest.mark.parametrize("strategy", ["fedavg", *slowly("apfl")])
def test_both_runners_draw_the_same_images(train, strategy):
    """APFL also looks at the first batch of a round."""
    words = [f"strategy={strategy}", CROPS, "model=linear", "model.dtype=float64", "client=sgd", *TINY]
    one, other = (train(*words, f"runtime.runner={r}", folder=r, small=False) for r in RUNNERS)
    compare(one, other, 1e-9, per_tensor=True)


def test_only_training_takes_numbers_with_codes_and_none_without(train, monkeypatch):
    seen = []

    def spied(inputs, labels, numbers, *, augmented):
        seen.append((augmented, bool((numbers >= len(labels)).any())))
        return augment.taken(inputs, labels, numbers, augmented=augmented)

    monkeypatch.setattr(client_data, "taken", spied)
    usual = train(*SHORT, folder="usual")
    assert seen and set(seen) == {(False, False)}
    seen.clear()
    # Codes that are all 0 leave every image as it is: what is left is the run without, to the bit, so that
    # neither the order of the rows nor what is evaluated has changed.
    monkeypatch.setattr(augment.torch, "randint", lambda high, shape, generator: torch.zeros(shape).long())
    still = train(*SHORT, CROPS, folder="still")
    assert set(seen) == {(True, False)} and same_bits(usual.model, still.model)
    monkeypatch.undo()
    row, twin = usual.rows[-1], still.rows[-1]
    assert all(row[key] == twin[key] for key in ("test_loss", "val_loss", "train_loss", "client_val_after"))


def test_evaluation_reads_the_image_as_it_is(train):
    """Before a round trains, the model is evaluated on plain rows, whatever becomes of them in training."""
    plain, shifted = (train(*SHORT, *more, folder=str(len(more))) for more in ([], [CROPS]))
    for key in ("test_loss", "val_loss"):
        assert plain.rows[0][key] == shifted.rows[0][key]
    assert plain.rows[1]["client_val_before"] == shifted.rows[1]["client_val_before"]
    assert plain.rows[1]["train_loss"] != shifted.rows[1]["train_loss"]


@pytest.mark.slow
def test_a_resumed_run_continues_with_the_same_images(train, monkeypatch):
    resumed_and_whole(train, monkeypatch, CROPS, "client.local_steps=1")


@pytest.mark.slow
def test_stacked_runs_draw_their_own_pictures(pairs):
    for alone, stacked in pairs(*(["strategy=fedavg", CROPS, f"seed={n}"] for n in range(2))):
        same(alone, stacked)
