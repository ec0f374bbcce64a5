"""Between the host and the device that computes."""

import torch
from torch import Tensor


def sent(array: Tensor, device: torch.device) -> Tensor:
    """From the host to the device, without waiting for what that does."""
    return array.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else array
