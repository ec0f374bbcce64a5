"""The cache: whole files, verified on reading, bounded, and never trusted."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from fedfrozen_app.core.digests import digest
from fedfrozen_app.exchange.cache import Cache
from tests.conftest import full_disk


def base_of(arrays):
    return {name: digest(tensor) for name, tensor in arrays.items()}


@pytest.fixture
def arrays():
    return {"a": torch.randn(10), "b": torch.randn(3, 3), "c": torch.tensor(2.0)}


def test_another_process_finds_what_one_put(tmp_path, arrays):
    base = base_of(arrays)
    Cache(tmp_path, 10**6).complete(base, arrays, verify=True)
    found, lacks = Cache(tmp_path, 10**6).complete(base, {}, verify=True)
    assert not lacks and all(torch.equal(found[name], arrays[name]) for name in arrays)


def test_what_is_neither_sent_nor_held_is_named(tmp_path, arrays):
    base = base_of(arrays)
    found, lacks = Cache(tmp_path, 10**6).complete(base, {"b": arrays["b"]}, verify=True)
    assert lacks == ["a", "c"] and list(found) == ["b"]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap", "delete"])
def test_a_damaged_file_is_asked_for_again_and_mended(tmp_path, arrays, damage):
    base = base_of(arrays)
    Cache(tmp_path, 10**6).complete(base, arrays, verify=True)
    path = tmp_path / f"{base['a']}.safetensors"
    content = path.read_bytes()
    if damage == "flip":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut":
        path.write_bytes(content[:-3])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "swap":  # another array under this name
        path.write_bytes((tmp_path / f"{base['b']}.safetensors").read_bytes())
    else:
        path.unlink()
    fresh = Cache(tmp_path, 10**6)
    _, lacks = fresh.complete(base, {}, verify=True)
    assert lacks == ["a"]
    found, lacks = fresh.complete(base, {"a": arrays["a"]}, verify=True)
    assert not lacks and torch.equal(found["a"], arrays["a"])
    assert Cache(tmp_path, 10**6).complete(base, {}, verify=True)[1] == []


def test_what_was_sent_is_checked_too(arrays):
    base = base_of(arrays)
    wrong = arrays | {"a": arrays["a"] + 1}
    _, lacks = Cache().complete(base, wrong, verify=True)
    assert lacks == ["a"]


def test_the_folder_stays_within_its_limit_and_drops_the_oldest(tmp_path):
    cache = Cache(tmp_path, 5000)
    tensors = [torch.full((250,), float(i)) for i in range(8)]  # 1,000 bytes each, and a header
    for number, tensor in enumerate(tensors):
        cache.put(digest(tensor), tensor)
        os.utime(tmp_path / f"{digest(tensor)}.safetensors", (number, number))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5000 + 1100
    assert digest(tensors[-1]) in cache.held() and digest(tensors[0]) not in cache.held()


def test_memory_holds_one_base(arrays):
    cache = Cache()
    cache.complete(base_of(arrays), arrays, verify=False)
    later = arrays | {"a": torch.randn(10)}
    cache.complete(base_of(later), {"a": later["a"]}, verify=False)
    assert cache.get(digest(arrays["a"])) is None
    assert cache.get(digest(later["a"])) is later["a"]


def test_a_digest_that_is_a_path_leads_nowhere(tmp_path, arrays):
    """The server names digests: it must not reach, read or remove a file outside the cache."""
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"the site's own")
    with pytest.raises(ValueError, match="no digest"):
        Cache(tmp_path / "cache", 10**6).complete({"a": "../model"}, {}, verify=True)
    assert other.read_bytes() == b"the site's own"


def test_a_full_disk_leaves_no_half_array(tmp_path, arrays):
    with full_disk(20), pytest.raises(SafetensorError):
        Cache(tmp_path, 10**6).complete(base_of(arrays), arrays, verify=True)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_not_looked_through_for_every_array(tmp_path, monkeypatch):
    """It fills with the arrays of all rounds: a look at each file for each array made rounds ever slower."""
    looks = []
    monkeypatch.setattr(
        Path, "stat", lambda path, real=Path.stat, **how: looks.append(path) or real(path, **how)
    )
    monkeypatch.setattr(os, "scandir", lambda path, real=os.scandir: looks.append(path) or real(path))
    cache = Cache(tmp_path, 10**6)
    for number in range(100):
        tensor = torch.full((10,), float(number))
        cache.put(digest(tensor), tensor)
    assert len(cache.held()) == 100
    assert len(looks) < 1000  # each file for each array: 5,000


def test_processes_that_share_a_folder_keep_its_limit_together(tmp_path):
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"somebody else's")
    caches = [Cache(tmp_path, 50_000) for _ in range(4)]
    for number in range(200):
        tensor = torch.full((250,), float(number))
        caches[number % 4].put(digest(tensor), tensor)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 50_100
    assert len(caches[0].held()) > 30 and digest(tensor) in caches[0].held()
    assert other.exists() and other.stem not in caches[0].held()
