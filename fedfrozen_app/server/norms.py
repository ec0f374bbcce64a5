"""Sums over a model's arrays that also compute norms in the same pass, because memory bandwidth is the limit;
and checks of updates by their norms."""

import math
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from fedfrozen_app.exchange.client_metrics import TOO_LARGE
from fedfrozen_app.vmap.load_gpu_kernels import gpu_kernels_on

CHUNK = 2**16  # elements: a piece, its base and its float64 copy stay in a core's cache together


def subtract(tensors: list[Tensor], bases: list[Tensor], scratch: Tensor) -> list[Tensor]:
    """tensor ← tensor − base for each; returns the norms. One pass, because memory bandwidth is the limit."""
    if tensors and tensors[0].device.type != "cpu":  # a launch costs more than the sums: one for all tensors
        torch._foreach_sub_(tensors, bases)
        return list(torch._foreach_norm(tensors, 2, dtype=torch.float64))
    return [_subtract(tensor, base, scratch) for tensor, base in zip(tensors, bases, strict=True)]


def _subtract(tensor: Tensor, base: Tensor, scratch: Tensor) -> Tensor:
    squares = []
    for piece, old in zip(_pieces(tensor), _pieces(base), strict=True):
        squares.append(_square(piece.sub_(old), scratch))
    return torch.stack(squares).sum().sqrt()


def row_norms(rows: Tensor) -> Tensor:
    """(rows, …) -> (rows,) in float64. On a GPU torch would first copy all rows to float64."""
    rows = rows.unsqueeze(-1).flatten(1)  # a row may be a scalar
    kernels = gpu_kernels_on(rows.device, "vmap.row_kernels") if rows.dtype == torch.float32 else None
    if kernels is None:
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    found: Tensor = kernels.square_sums(rows, torch.float64).sqrt_()
    return found


def norm_of(tensor: Tensor, scratch: Tensor) -> Tensor:
    """The norm of an array, which does not change."""
    return torch.stack([_square(piece, scratch) for piece in _pieces(tensor.contiguous())]).sum().sqrt()


def divide(totals: list[Tensor], weights: list[float], scratch: Tensor) -> list[Tensor]:
    """total ← total / weight for each; returns the norms, in the same pass."""
    if totals and totals[0].device.type != "cpu":
        torch._foreach_div_(totals, weights)
        return list(torch._foreach_norm(totals, 2, dtype=torch.float64))
    return [_divide(total, weight, scratch) for total, weight in zip(totals, weights, strict=True)]


def _divide(total: Tensor, weight: float, scratch: Tensor) -> Tensor:
    squares = [_square(piece.div_(weight), scratch) for piece in _pieces(total)]
    return torch.stack(squares).sum().sqrt()


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    flat = tensor.view(-1)
    # No small pieces on a GPU: each would cost a launch.
    return flat.split(CHUNK) if flat.device.type == "cpu" else (flat,)


def _square(piece: Tensor, scratch: Tensor) -> Tensor:
    """‖piece‖² in float64.

    On the host it uses a scratch buffer, which is ten times faster than `vector_norm` in float64.
    """
    if piece.device.type != "cpu":
        return torch.linalg.vector_norm(piece, dtype=torch.float64).square()
    wide = scratch[: len(piece)].copy_(piece)
    return torch.dot(wide, wide)


class NormGate:
    """Sets aside updates whose norm exceeds `far_out` times the median, and keeps the norms of the others."""

    def __init__(self, far_out: float, median: float | None) -> None:
        self.far_out, self.last_median = far_out, median
        self.norms: list[float] = []

    def problem(self, norm: float) -> str | None:
        if self.last_median and norm > self.far_out * self.last_median:
            return f"lies far out: the norm of its update is {norm / self.last_median:.3g} times the usual"
        self.norms.append(norm)
        return None

    def median(self) -> float | None:
        """The median norm of this round's accepted updates; the last round's if there are none."""
        return statistics.median(self.norms) if self.norms else self.last_median


def unsound(norms: Mapping[str, float]) -> str:
    """Why an update with these norms is set aside, as the rest of a sentence."""
    name = next(name for name, norm in norms.items() if not norm < TOO_LARGE)
    finite = math.isfinite(norms[name])
    return f"holds values that are {'too large to average' if finite else 'not finite'} in {name}"
