"""Macro F1 of a client's few rows, beside scikit-learn's."""

import numpy as np
import torch
from sklearn.metrics import f1_score

from fedfrozen_app.tasks.classification import f1


def test_macro_f1_is_scikit_learns_to_the_bit():
    generator = np.random.default_rng(0)
    for _ in range(60):
        rows, classes = int(generator.integers(1, 30)), int(generator.integers(1, 8))
        truth, guess = (generator.integers(0, classes, rows) for _ in range(2))
        expected = f1_score(truth, guess, average="macro", zero_division=0)
        assert f1(torch.from_numpy(guess), torch.from_numpy(truth), "macro") == expected


def test_macro_f1_by_hand():
    # Class 0: one of two found, nothing else called so: 2/3. Class 2 is only guessed: 0. Class 5: found: 1.
    assert f1(torch.tensor([0, 2, 5]), torch.tensor([0, 0, 5]), "macro") == (2 / 3 + 0 + 1) / 3
