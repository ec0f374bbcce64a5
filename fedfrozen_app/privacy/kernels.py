"""The kernels that Triton makes for private steps, where there is a GPU that it serves."""

import logging
from functools import cache
from types import ModuleType

import torch

from fedfrozen_app.devices import has_kernels
from fedfrozen_app.words import told

log = logging.getLogger(__name__)


@cache
def kernels_on(device: torch.device) -> ModuleType | None:
    """`privacy/gpu_kernels.py`; None where torch's own operations have to do."""
    if not has_kernels(device):
        return None
    try:
        from fedfrozen_app.privacy import gpu_kernels  # Triton, which is a GPU's

        with torch.cuda.device(device):  # of several: Triton takes the thread's own
            gpu_kernels.try_out(device)
    except Exception as error:  # noqa: BLE001  (a compiler can fail in any way, and nothing depends on it)
        log.warning(
            "GPU kernels for private steps could not be made, and steps are slower without: %s", told(error)
        )
        return None
    return gpu_kernels
