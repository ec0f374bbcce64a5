"""The kernels that Triton makes, where there is a GPU that it serves."""

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from fedfrozen_app.devices import has_kernels
from fedfrozen_app.words import told

log = logging.getLogger(__name__)


@cache
def kernels_on(device: torch.device, name: str) -> ModuleType | None:
    """The module `fedfrozen_app.{name}`; None where torch's own operations have to do."""
    if not has_kernels(device):
        return None
    try:
        kernels = import_module(f"fedfrozen_app.{name}")  # Triton, which is a GPU's
        with torch.cuda.device(device):  # of several: Triton takes the thread's own
            kernels.try_out(device)
            torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001  (a compiler can fail in any way, and nothing depends on it)
        log.warning("GPU kernels (%s) could not be made, and steps are slower without: %s", name, told(error))
        return None
    return kernels
