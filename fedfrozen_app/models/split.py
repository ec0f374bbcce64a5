"""Split projections that hold query, key and value in one tensor, so that each can be frozen.

Only the attention kernel may be frozen, never the value; in one tensor they could not be
separated. The split model computes the same as the fused one; `join_fused` restores the original tensors for
export. To support another architecture, add a row to ``FUSED``.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedfrozen_app.core.errors import UserError

PARTS = ("query", "key", "value")


@dataclass(frozen=True)
class Fused:
    """The fused modules of one architecture: consecutive equal thirds in `PARTS`' order.

    `module` matches their full names. `axis` is the weight's output axis: 1 in a transformers
    Conv1D, whose weight is (in, out), and 0 in an nn.Linear, whose weight is (out, in).
    """

    module: str
    axis: int


FUSED = {
    "gpt2": Fused(r"(?:transformer\.)?h\.\d+\.attn\.c_attn", axis=1),
    "modernbert": Fused(r"(?:model\.)?layers\.\d+\.attn\.Wqkv", axis=0),
}


class SplitProjection(nn.Module):
    """Three projections in place of a fused one, with the same output."""

    def __init__(self, fused: Conv1D | nn.Linear, axis: int) -> None:
        super().__init__()
        size = len(PARTS)
        weights = fused.weight.detach().chunk(size, dim=axis)
        biases = [None] * size if fused.bias is None else fused.bias.detach().chunk(size)
        for part, weight, bias in zip(PARTS, weights, biases, strict=True):
            self.add_module(part, _projection(weight, bias, axis))
        self.requires_grad_(fused.weight.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        # x (..., in) -> (..., 3 out): three products, so that frozen ones need no weight gradient
        return torch.cat([getattr(self, part)(x) for part in PARTS], dim=-1)


def _projection(weight: Tensor, bias: Tensor | None, axis: int) -> nn.Module:
    # On the meta device: the constructors' own random weights would disturb the generator.
    with torch.device("meta"):
        if axis == 1:
            layer: nn.Module = Conv1D(weight.shape[1], weight.shape[0])
        else:
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone())
    return layer


def split_fused(model: nn.Module) -> None:
    """Replace every fused query-key-value projection of `model`, in place."""
    row = FUSED.get(getattr(getattr(model, "config", None), "model_type", ""))
    if row is None:
        return
    for name, module in list(model.named_modules()):
        if re.fullmatch(row.module, name) and isinstance(module, Conv1D | nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, SplitProjection(module, row.axis))


def join_fused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Restore the original names and shapes of split tensors in `state`; leave others unchanged."""
    joined: dict[str, Tensor] = {}
    for name, tensor in state.items():
        found = _split_name(name)
        if found is None:
            joined[name] = tensor
            continue
        module, leaf, axis = found
        if f"{module}.{leaf}" in joined:
            continue
        names = [f"{module}.{part}.{leaf}" for part in PARTS]
        if missing := [n for n in names if n not in state]:
            raise UserError(f"cannot join '{module}.{leaf}': the state lacks {', '.join(missing)}")
        joined[f"{module}.{leaf}"] = torch.cat([state[n] for n in names], dim=axis if leaf == "weight" else 0)
    return joined


def fused_part(path: str) -> tuple[str, str] | None:
    """The fused projection to which this path's projection belongs, and which part it is."""
    found = _split_name(f"{path}.weight")
    return None if found is None else (found[0], path.rpartition(".")[2])


def _split_name(name: str) -> tuple[str, str, int] | None:
    """The fused module, "weight" or "bias", and the axis, if `name` is a part of a fused tensor."""
    module, _, rest = name.rpartition(".")
    module, _, part = module.rpartition(".")
    if part in PARTS and rest in ("weight", "bias"):
        for row in FUSED.values():
            if re.fullmatch(row.module, module):
                return module, rest, row.axis
    return None
