"""`dataset=arrays`: numbers in NumPy files."""

import numpy as np
import pytest
import torch

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources import prepare, read_ready
from fedfrozen_app.data.sources.raw_rows import DatasetSpec


def write(folder, rows=12, **others):
    """Each client has three rows; the label of row i is i modulo 3."""
    for split, count in (("train", rows), ("test", 4)):
        (folder / split).mkdir(parents=True)
        arrays = {
            "numbers": np.arange(2 * count, dtype=np.float32).reshape(count, 2),
            "labels": np.arange(count) % 3,
        }
        if split == "train":
            arrays |= {"client": np.arange(count, dtype=np.int32) // 3} | others
        for name, values in arrays.items():
            np.save(folder / split / f"{name}.npy", values)
    return DatasetSpec(name="arrays", kind="arrays", path=str(folder))


def test_rows_stay_in_their_file(tmp_path):
    corpus = read_ready(write(tmp_path))
    assert corpus.classes == ("0", "1", "2") and corpus.task == "table"
    assert corpus.train.inputs["numbers"][5].tolist() == [10.0, 11.0]
    assert corpus.train.labels.tolist() == [0, 1, 2] * 4 and corpus.train.labels.dtype == torch.int64
    assert corpus.columns["client"].tolist() == [row // 3 for row in range(12)]
    assert len(corpus.test) == 4 and corpus.units.tolist() == list(range(12))
    with torch.no_grad():  # what is written to it does not reach the file
        corpus.train.inputs["numbers"][0, 0] = 99
    assert np.load(tmp_path / "train/numbers.npy")[0, 0] == 0


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("numbers", np.zeros((12, 2), dtype=np.int64), "write float32 or float64"),
        ("numbers", np.full((12, 2), np.nan, dtype=np.float32), "no finite number"),
        ("labels", np.arange(11), "a whole number from 0 for each of the 12 rows"),
        ("labels", np.arange(12) - 1, "a whole number from 0"),
        ("client", np.zeros(12), "a whole number or a text"),
    ],
)
def test_what_it_cannot_read_is_one_sentence(tmp_path, name, values, says):
    spec = write(tmp_path)
    np.save(tmp_path / "train" / f"{name}.npy", values)
    with pytest.raises(UserError, match=says):
        read_ready(spec)


def test_files_that_lack_or_are_none_are_named(tmp_path):
    spec = write(tmp_path)
    (tmp_path / "train/client.npy").write_bytes(b"client,1,2,3")
    with pytest.raises(UserError, match=r"client\.npy is no NumPy file"):
        read_ready(spec)
    (tmp_path / "test/labels.npy").unlink()
    (tmp_path / "train/client.npy").unlink()
    with pytest.raises(UserError, match=r"labels\.npy does not exist"):
        read_ready(spec)


def test_what_needs_words_says_so(tmp_path):
    with pytest.raises(UserError, match="dataset=table"):
        prepare(write(tmp_path))
