"""A client's newest reply on its own disk."""

import pytest
import torch
from safetensors.torch import save_file

from fedfrozen_app.privacy.budget import Budget, BudgetFile

ARRAYS = {
    "bias": torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16),
    "weight": torch.arange(6, dtype=torch.float64).view(2, 3),
    "scale": torch.tensor(0.5),
    "none": torch.zeros(0, 4),
}


@pytest.fixture
def file(tmp_path):
    file = BudgetFile(tmp_path, "0")
    file.write(Budget("0", "example", 1e-5, 8, noise=1.0, last_order="this"))
    return file


@pytest.mark.parametrize("arrays", [ARRAYS, {}], ids=["some", "none"])
def test_a_kept_reply_is_given_again_to_its_own_order_alone(file, arrays):
    file.keep_reply("this", {"weight": torch.ones(3)})
    file.keep_reply("this", arrays)
    found = file.kept_reply("this")
    assert list(found) == list(arrays)
    for name, value in arrays.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)
    assert file.kept_reply("another") is None
    file.keep_reply("another", arrays)
    assert file.kept_reply("this") is None


def test_a_reply_that_was_kept_array_by_array_is_read(file, tmp_path):
    save_file(ARRAYS, tmp_path / "0.safetensors", metadata={"order": "this"})
    found = file.kept_reply("this")
    assert found.keys() == ARRAYS.keys()
    assert all(torch.equal(found[name], value) for name, value in ARRAYS.items())


def test_a_reply_that_is_damaged_is_none(file, tmp_path, caplog):
    file.keep_reply("this", ARRAYS)
    path = tmp_path / "0.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    assert file.kept_reply("this") is None
    assert "is paid for again" in caplog.text
