"""A client's newest reply on its own disk."""

import fcntl

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
    file.keeping("this", {"weight": torch.ones(3)}, {})()
    file.keeping("this", arrays, {})()
    found = file.kept_reply("this")
    assert list(found) == list(arrays)
    for name, value in arrays.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)
    assert file.kept_reply("another") is None
    file.keeping("another", arrays, {})()
    assert file.kept_reply("this") is None


def test_a_reply_that_was_kept_array_by_array_is_read(file, tmp_path):
    save_file(ARRAYS, tmp_path / "0.safetensors", metadata={"order": "this"})
    found = file.kept_reply("this")
    assert found.keys() == ARRAYS.keys()
    assert all(torch.equal(found[name], value) for name, value in ARRAYS.items())


def test_a_reply_that_is_damaged_is_none(file, tmp_path, caplog):
    file.keeping("this", ARRAYS, {})()
    path = tmp_path / "0.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    assert file.kept_reply("this") is None
    assert "is trained again" in caplog.text


def test_nobody_opens_a_record_before_its_reply_is_kept(file, tmp_path):
    """Whose block is over by then: an answer need not wait for the disk."""
    with file.alone():
        keep = file.keeping("this", ARRAYS, {"round": 1})
    with (tmp_path / "0.lock").open("w") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert file.kept_reply("this") is None
        keep()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert file.kept_reply("this").keys() == ARRAYS.keys()
    assert (tmp_path / "0.jsonl").read_text() == '{"round": 1}\n'


def test_what_is_kept_later_is_what_was_sent(file):
    sent = {"weight": torch.ones(3)}
    keep = file.keeping("this", sent, {}, apart=True)
    sent["weight"] -= 1  # the server makes an update of it
    keep()
    assert torch.equal(file.kept_reply("this")["weight"], torch.ones(3))
