"""Crops and flips of training pictures, against pixels moved by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.seeds import torch_generator
from fedfrozen_app.data.augment import CODES, PLACES, check_pictures, taken, with_codes
from fedfrozen_app.data.table import Table
from fedfrozen_app.local.worker import Worker

# Two pictures of 5x6 whose pixels are their own places: row, column, and 100 for the second picture.
PIXELS = (10 * torch.arange(5)[:, None] + torch.arange(6)).to(torch.uint8)
PICTURES = torch.stack([PIXELS, PIXELS + 100])[:, None].repeat(1, 3, 1, 1)
PICTURES[:, 1] += 1
LABELS = torch.tensor([7, 8])


def number(row, *, down=0, right=0, flip=0):
    return row + len(LABELS) * (flip * PLACES**2 + down % PLACES * PLACES + right % PLACES)


def pictures_of(*numbers):
    inputs = {"pixel_values": PICTURES}
    found, labels = taken(inputs, LABELS, torch.tensor(numbers), augmented=True)
    return found["pixel_values"], labels


def test_pixels_come_from_where_a_hand_would_take_them():
    numbers = number(0), number(1, down=1), number(0, right=-2), number(1, down=-4, right=3, flip=1)
    found, labels = pictures_of(*numbers)
    assert found.dtype == torch.uint8 and labels.tolist() == [7, 8, 7, 8]
    assert torch.equal(found[0], PICTURES[0])
    # One down in the source: the last line mirrors the one before the border, which is not repeated.
    assert found[1, 0, :, 0].tolist() == [110, 120, 130, 140, 130]
    assert found[2, 0, 0].tolist() == [2, 1, 0, 1, 2, 3]
    assert found[3, 0, :, 5].tolist() == [143, 133, 123, 113, 103]
    assert found[3, 1, 4].tolist() == [103, 104, 105, 106, 105, 104]  # the flip turns round what was cut out


def test_every_code_is_a_window_of_the_reflected_picture():
    picture = torch.arange(3 * 12 * 14).remainder(251).to(torch.uint8).view(1, 3, 12, 14)
    inputs, one_row = {"pixel_values": picture}, torch.zeros(1).long()
    found = taken(inputs, one_row, torch.arange(CODES), augmented=True)[0]["pixel_values"]
    wide = pad(picture.double(), (4, 4, 4, 4), mode="reflect")[0].to(torch.uint8)
    windows = [wide[:, y : y + 12, x : x + 14] for y in range(9) for x in range(9)]
    expected = {bytes(w.flatten().tolist()) for window in windows for w in (window, window.flip(2))}
    assert {bytes(each.flatten().tolist()) for each in found} == expected and len(expected) == CODES


def test_clients_side_by_side_see_what_each_would_alone():
    numbers = torch.tensor([[number(0, down=2), number(1, flip=1)], [number(1, right=4), 0]])

    def take(pixels, index):
        return vmap(lambda own: taken({"pixel_values": pixels}, LABELS, own, augmented=True)[0])(index)

    together = make_fx(take)(PICTURES, numbers)(PICTURES, numbers)["pixel_values"]
    for own, index in zip(together, numbers, strict=True):
        assert torch.equal(own, pictures_of(*index.tolist())[0])


def test_codes_leave_the_rows_as_they_are_and_use_all_places():
    rows = torch.arange(10_000) % 50
    drawn = with_codes(rows, 50, torch_generator(0, "augment"))
    assert torch.equal(drawn % 50, rows) and set((drawn // 50).tolist()) == set(range(CODES))


def test_texts_and_very_small_pictures_are_refused():
    texts = SimpleNamespace(train=Table({"input_ids": LABELS[:, None]}, LABELS))
    with pytest.raises(UserError, match="shifts and flips pictures, and these data are none"):
        check_pictures(texts, "crop_flip")
    small = SimpleNamespace(train=Table({"pixel_values": PICTURES[:, :, :4]}, LABELS))
    with pytest.raises(UserError, match="by up to 4 pixels, and these pictures are 4x6"):
        check_pictures(small, "crop_flip")
    check_pictures(texts, "none")


def test_features_that_are_read_once_cannot_change():
    config = SimpleNamespace(dataset=SimpleNamespace(augment="crop_flip"))
    frozen = SimpleNamespace(features=lambda model: "an encoder")
    worker = SimpleNamespace(device="cpu", wrapper=frozen, model=None, config=config, augments=True)
    with pytest.raises(UserError, match="frozen encoder are read once"):
        Worker._on_device(worker, Table({"pixel_values": PICTURES}, LABELS))


def test_private_training_refuses_it(capsys):
    assert command(["dataset.augment=crop_flip", "privacy=dp_sgd"]) == 2
    assert "dataset.augment=crop_flip is not made for privacy=dp_sgd" in capsys.readouterr().err
