"""Between the host and the device that computes."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

OLDEST = (8, 0)  # a GPU's generation for which Triton makes kernels


def sent(array: Tensor, device: torch.device) -> Tensor:
    """From the host to the device, without waiting for what that does."""
    return array.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else array


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton makes kernels for it."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST


def is_exact() -> bool:
    """Whether float32 is asked for: then a product is three of tensor cores, whose sum is as exact."""
    return torch.get_float32_matmul_precision() == "highest"
