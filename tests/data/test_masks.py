"""Pictures and volumes with masks: what is read, and a sentence for each thing that is wrong."""

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.augment import CODES, taken
from fedfrozen_app.data.sources import DatasetSpec, load
from tests.data.masked import draw


def read(folder, **settings):
    kind = settings.pop("kind", "images")
    return load(DatasetSpec(name="m", kind=kind, task="segmentation", path=str(folder), **settings))


def test_pictures_and_masks_of_two_sites(tmp_path):
    corpus = read(draw(tmp_path / "d", sites=("east", "west")), test_fraction=0.25)
    assert corpus.task == "segmentation" and corpus.classes == ("0", "255")
    assert corpus.train.inputs["pixel_values"].shape[1:] == (1, 16, 16)
    assert corpus.train.labels.dtype is torch.uint8 and corpus.train.labels.shape[1:] == (16, 16)
    assert len(corpus.train) + len(corpus.test) == 21
    assert sorted(set(corpus.columns["domain"])) == ["east", "west"]
    bright = corpus.train.inputs["pixel_values"][:, 0].double()
    inside = corpus.train.labels == 1
    assert bright[inside].mean() > bright[~inside].mean() + 60  # each picture has its own mask


def test_splits_and_sizes(tmp_path):
    draw(tmp_path / "d" / "train", count=4)
    draw(tmp_path / "d" / "test", count=2, seed=1)
    corpus = read(tmp_path / "d", image_size=8)
    assert len(corpus.train) == 4 and len(corpus.test) == 2
    assert corpus.train.labels.shape == (4, 8, 8) and set(corpus.train.labels.unique().tolist()) == {0, 1}


def test_a_mask_of_another_size_is_refused(tmp_path):
    draw(tmp_path, count=3)
    Image.fromarray(np.zeros((16, 20), dtype=np.uint8)).save(tmp_path / "masks" / "01_mask.png")
    with pytest.raises(UserError, match=r"20x16 pixels, and its picture .* 16x16: they must be of one size"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda d: (d / "masks" / "01_mask.png").unlink(), "01.png has no mask: put one file named 01"),
        (lambda d: Image.new("L", (16, 16)).save(d / "masks" / "01-b.png"), "01.png has several masks"),
        (lambda d: (d / "masks" / "01_mask.png").write_bytes(b"x"), "Cannot read .*01.png and its mask"),
        (
            lambda d: Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).save(
                d / "masks" / "01_mask.png"
            ),
            "has 256 values, as a lossy or smoothed file",
        ),
        (
            lambda d: Image.new("RGB", (16, 16), (1, 2, 3)).save(d / "masks" / "01_mask.png"),
            "is in colour: save it grey",
        ),
    ],
    ids=["no mask", "several", "broken", "lossy", "colour"],
)
def test_one_sentence_for_what_is_wrong(tmp_path, harm, sentence):
    harm(draw(tmp_path, count=3))
    with pytest.raises(UserError, match=sentence):
        read(tmp_path)


def test_no_masks_at_all_and_one_class_alone(tmp_path):
    with pytest.raises(UserError, match=r"No pictures with masks found"):
        read(tmp_path)
    draw(tmp_path / "d", count=3)
    for file in (tmp_path / "d" / "masks").iterdir():
        Image.new("L", (16, 16)).save(file)
    with pytest.raises(UserError, match=r"1 class \(0\): at least 2 are needed"):
        read(tmp_path / "d")


def test_a_site_with_other_values_is_told_so(tmp_path):
    draw(tmp_path, count=3)
    with pytest.raises(UserError, match=r"Label '255' of .* is not among the agreed classes"):
        load(DatasetSpec(kind="images", task="segmentation", path=str(tmp_path)), classes=("0", "1"))


def test_masks_move_with_their_pictures(tmp_path):
    corpus = read(draw(tmp_path, count=6), test_fraction=0.2)
    table, rows = corpus.train, torch.arange(len(corpus.train))
    numbers = rows + len(table) * torch.arange(1, len(rows) + 1) * (CODES // 7)
    marked = {"pixel_values": (table.labels * 255)[:, None]}
    inputs, labels = taken(marked, table.labels, numbers, augmented=True)
    assert torch.equal(inputs["pixel_values"][:, 0], labels * 255)
    assert not torch.equal(labels, table.labels)


def volumes(folder, *, shape=(6, 6, 4), persons=3):
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for person in range(persons):
        inside = np.zeros(shape, dtype=np.int16)
        inside[1:3, 2:5, 1:] = person % 2 + 1
        picture = rng.normal(0, 1, shape) + 5 * inside
        for kind, values in (("images", picture), ("masks", inside)):
            file = folder / kind / f"sub-{person:02}_T1w.nii.gz"
            nibabel.save(nibabel.Nifti1Image(values.astype(np.float32), np.eye(4)), file)
    return folder


def test_volumes_are_cut_into_slices_with_their_masks(tmp_path):
    corpus = read(volumes(tmp_path), kind="nifti", test_fraction=0.3)
    assert corpus.classes == ("0", "1", "2") and len(corpus.train) + len(corpus.test) == 12
    assert len(set(corpus.units.tolist())) + len(set(corpus.test_units.tolist())) == 3  # nobody is parted
    slices = [int(label.sum() > 0) for label in corpus.train.labels[:4]]
    assert slices == [0, 1, 1, 1]
    inside = corpus.train.labels[1] > 0
    assert inside.nonzero()[:, 0].tolist() == [1, 1, 2, 2, 3, 3]  # turned as the picture is
    assert corpus.train.inputs["pixel_values"][1, 0][inside].double().mean() > 150
    assert len(read(tmp_path, kind="nifti", slices=2, test_fraction=0.3).train) in (2, 4)


def test_a_volume_with_a_mask_of_another_shape(tmp_path):
    volumes(tmp_path)
    wrong = nibabel.Nifti1Image(np.zeros((6, 6, 3), dtype=np.float32), np.eye(4))
    nibabel.save(wrong, tmp_path / "masks" / "sub-01_T1w.nii.gz")
    with pytest.raises(UserError, match="6x6x3 voxels, and its volume 6x6x4: resample one"):
        read(tmp_path, kind="nifti")
