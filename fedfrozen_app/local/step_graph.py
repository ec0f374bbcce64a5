"""One step captured as a CUDA graph, with the tensors from which it reads its batch."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.local.recording import recorded

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

log = logging.getLogger(__name__)
WARMUP_STEPS = 1  # before a capture: lazy initialisations must not be captured


class StepGraph:
    def __init__(self, index: Tensor, mask: Tensor) -> None:
        self._index, self._mask = index.clone(), mask.clone()
        self._graph: torch.cuda.CUDAGraph | None = None

    def record(self, worker: "Worker", step: Callable[[Tensor, Tensor], None]) -> None:
        """Capture this step. The warm-up takes it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP_STEPS):
                step(self._index, self._mask)
        torch.cuda.current_stream().wait_stream(side)
        missed = worker.blocks.missed
        work = partial(step, self._index, self._mask)
        self._graph = recorded(work, alone=True)
        if missed := worker.blocks.missed - missed:
            log.warning("%s of the recorded step could not use what was compiled.", counted(missed, "block"))

    def set_batch(self, index: Tensor, mask: Tensor) -> None:
        self._index.copy_(index)
        self._mask.copy_(mask)

    def replay(self) -> None:
        assert self._graph is not None
        self._graph.replay()
