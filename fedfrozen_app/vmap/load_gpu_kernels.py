"""Load GPU kernels compiled by Triton, if the GPU is supported."""

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from fedfrozen_app.core.formatting import format_error
from fedfrozen_app.vmap.devices import has_gpu_kernels

log = logging.getLogger(__name__)


@cache
def gpu_kernels_on(device: torch.device, name: str) -> ModuleType | None:
    """The module `fedfrozen_app.{name}`; None to use torch's own operations."""
    if not has_gpu_kernels(device):
        return None
    try:
        kernels = import_module(f"fedfrozen_app.{name}")  # Triton needs a GPU
        with torch.cuda.device(device):  # Triton uses the thread's current device
            kernels.self_test(device)
            torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001  (a compiler can fail in any way, and training works without)
        log.warning(
            "GPU kernels (%s) could not be compiled, and steps are slower without: %s",
            name,
            format_error(error),
        )
        return None
    return kernels
