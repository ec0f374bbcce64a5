"""What very many clients keep, on disk."""

import pytest
import torch

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import client_segments
from fedfrozen_app.files.client_segments import ClientSegments


def arrays(value, size=2):
    return {"head/weight": torch.full((size, 3), float(value)), "steps": torch.tensor(value)}


def of(segments, client):
    return int(segments.read(client)["steps"])


def test_the_newest_arrays_of_a_client_are_read(tmp_path):
    segments = ClientSegments(tmp_path)
    segments.write({1: arrays(10), 5: arrays(50), 9: arrays(90, size=4)})
    segments.write({5: arrays(51)})
    assert [of(segments, client) for client in (1, 5, 9)] == [10, 51, 90]
    assert segments.read(9)["head/weight"].shape == (4, 3) and segments.read(1)["steps"].ndim == 0
    assert torch.equal(segments.read(5)["head/weight"], arrays(51)["head/weight"])
    assert 2 not in segments and len(segments) == 3


def test_a_checkpoint_finds_its_own_segments_again(tmp_path):
    segments = ClientSegments(tmp_path)
    segments.write({1: arrays(1), 2: arrays(2)})
    named = segments.named()
    segments.write({1: arrays(11)})
    again = ClientSegments(tmp_path)
    again.restore(named, tmp_path)
    assert [of(again, client) for client in (1, 2)] == [1, 2]
    assert [path.name for path in (tmp_path / client_segments.FOLDER).iterdir()] == ["1.safetensors"]


def test_another_run_takes_a_copy(tmp_path):
    segments = ClientSegments(tmp_path / "one")
    segments.write({3: arrays(3)})
    other = ClientSegments(tmp_path / "other")
    other.restore(segments.named(), tmp_path / "one")
    other.write({3: arrays(33)})
    assert of(other, 3) == 33 and of(segments, 3) == 3


def test_only_what_a_checkpoint_names_stays(tmp_path):
    segments = ClientSegments(tmp_path)
    segments.write({1: arrays(1)})
    first = segments.named()
    segments.write({1: arrays(2)})
    second = segments.named()
    assert list(second) == ["2"]
    files = tmp_path / client_segments.FOLDER
    segments.keep_only([first, second])
    assert len(list(files.iterdir())) == 2
    segments.keep_only([second])
    assert [path.name for path in files.iterdir()] == ["2.safetensors"]


def test_few_of_many_files_are_open(tmp_path, monkeypatch):
    monkeypatch.setattr(client_segments, "MOST_OPEN", 2)
    segments = ClientSegments(tmp_path)
    for client in range(5):
        segments.write({client: arrays(client)})
    assert [of(segments, client) for client in (4, 0, 3, 1, 2, 0)] == [4, 0, 3, 1, 2, 0]
    assert list(segments.named()) == ["1", "2", "3", "4", "5"] and len(segments._open) == 2


def test_a_damaged_segment_is_one_sentence(tmp_path):
    segments = ClientSegments(tmp_path)
    segments.write({1: arrays(1)})
    named, path = segments.named(), tmp_path / client_segments.FOLDER / "1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"1\.safetensors, which the checkpoint needs, cannot be read"):
        ClientSegments(tmp_path).restore(named, tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="bring it back from a copy"):
        ClientSegments(tmp_path).restore(named, tmp_path)
