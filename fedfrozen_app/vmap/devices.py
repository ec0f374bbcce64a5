"""Transfers between host and device, and properties of devices."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

OLDEST = (8, 0)  # the oldest GPU generation for which Triton compiles


def sent(array: Tensor, device: torch.device) -> Tensor:
    """Copy from the host to the device without waiting for it."""
    return array.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else array


@cache
def has_gpu_kernels(device: torch.device) -> bool:
    """Whether Triton compiles GPU kernels for it."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST


def is_exact() -> bool:
    """Whether full float32 precision is required: a product is then three products on tensor cores."""
    return torch.get_float32_matmul_precision() == "highest"
