"""A very small model on a CPU gets one thread and plain products, unless somebody has chosen."""

import platform

import pytest
import torch

from fedfrozen_app.runtimes.inprocess.runtime import is_small, tuned_for_size, wants_cohort
from tests.conftest import worker_of

OPEN = ("runtime.runner=auto", "runtime.threads=null")


@pytest.mark.parametrize(
    ("words", "small"),
    [
        (OPEN, True),
        (("runtime.runner=auto", "runtime.threads=2"), False),
        (("runtime.runner=sequential", "runtime.threads=null"), False),
        ((*OPEN, "model=linear"), False),
    ],
    ids=["open", "threads", "runner", "no attention"],
)
def test_a_small_transformer_is_given_what_suits_it(words, small, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    worker = worker_of(*words)
    assert is_small(worker)
    before = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(2)
    try:
        with tuned_for_size(worker):
            assert torch.get_num_threads() == (1 if small else 2)
            assert torch.backends.mkldnn.enabled == (before[1] and not small)
        assert (torch.get_num_threads(), torch.backends.mkldnn.enabled) == (2, before[1])
    finally:
        torch.set_num_threads(before[0])
    assert wants_cohort(worker) == (words[0] == "runtime.runner=auto")
