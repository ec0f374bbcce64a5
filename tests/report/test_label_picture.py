from contextlib import nullcontext

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fedfrozen_app.report import label_picture as picture
from fedfrozen_app.report.label_picture import _step, label_picture

pytestmark = pytest.mark.pictures

LARGER = [pytest.param(*size, marks=pytest.mark.slow) for size in ((30, 20), (500, 70))]


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (31, 3), *LARGER])
def test_picture_is_a_readable_png_of_sane_size(tmp_path, clients, classes):
    settings = dict(matplotlib.rcParams)
    counts = np.random.default_rng(0).integers(0, 50, (clients, classes))
    names = [f"a class with a rather long name, number {number}" for number in range(classes)]
    path = tmp_path / "labels.png"
    label_picture(counts, names, [str(client) for client in range(clients)], path)
    image = np.asarray(Image.open(path).convert("RGB"))
    assert image.shape[0] < 2000 and image.shape[1] < 2500
    # Nothing is cut off: the outermost pixels are background.
    frame = [image[0], image[-1], image[:, 0], image[:, -1]]
    assert all((edge == 255).all() for edge in frame)
    assert len(np.unique(image.astype(np.uint32) @ [1, 256, 65536])) > 5
    assert dict(matplotlib.rcParams) == settings


def test_a_run_without_examples_can_be_drawn(tmp_path):
    label_picture(np.zeros((40, 3), dtype=int), "abc", ["x"] * 40, tmp_path / "empty.png")


def test_ticks_come_in_round_steps():
    assert [_step(count, 40) for count in (1, 40, 41, 100, 1000, 1001)] == [1, 1, 2, 5, 50, 50]


def test_the_colour_bar_counts_whole_examples(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(picture, "whole_file", lambda path: figures.append(path) or nullcontext(path))
    made = []
    original = Figure.colorbar
    monkeypatch.setattr(
        Figure,
        "colorbar",
        lambda self, *a, **k: made.append(original(self, *a, **k)) or made[-1],
    )
    label_picture(np.ones((40, 3), dtype=int), "abc", ["x"] * 40, tmp_path / "few.png")
    assert figures and all(float(tick).is_integer() for tick in made[0].get_ticks())
