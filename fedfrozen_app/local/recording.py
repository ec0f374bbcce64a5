"""Record work on a GPU as a CUDA graph, to be replayed."""

import gc
from collections.abc import Callable
from typing import Any

import torch


def recorded(work: Callable[[], None], *, alone: bool, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Record `work`. `alone`: no other thread uses a GPU during it, so that any illegal call is caught."""
    here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    # An old graph freed during recording would invalidate the new one.
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="global" if alone else "thread_local"):
            work()
    finally:
        gc.enable()
        torch.cuda.set_stream(here)  # after a failed recording torch stays on the recording's stream
    return graph
