"""Work on a GPU recorded as a CUDA graph, to be replayed."""

import gc
from collections.abc import Callable
from typing import Any

import torch


def recorded(work: Callable[[], None], *, alone: bool, pool: Any = None) -> torch.cuda.CUDAGraph:
    """`alone`: no other thread uses a GPU while this is recorded, so that any illegal call is caught."""
    here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    # An old graph that is freed while this one is recorded would invalidate it.
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="global" if alone else "thread_local"):
            work()
    finally:
        gc.enable()
        torch.cuda.set_stream(here)  # torch leaves a recording that failed on its own stream
    return graph
