"""Low-rank adapters: Hu et al., LoRA, arXiv 2106.09685.

    W = W₀ + s·BA        A (r, in)    B (out, r)    s = α/r

W₀ is frozen. A and B are two linear layers inside the projection that they adapt: all other names of the
model do not change, and theirs are peft's (`query.lora_A.weight`). B starts at 0, A uniform in ±1/√in. A
client of a smaller rank has the first rows of A and columns of B; zero padding remains zero, since the
gradient of each is 0 where the other is 0.

A round's change of W₀ is a *merged delta*: the product of `fold.ROUND/query.lora_A.weight` and
`.lora_B.weight`, or `fold.ROUND/query.weight`, (out, in), if that is smaller.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from fedfrozen_app.adapters.merged_deltas import is_merged_delta, merged_delta_name, round_of
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.seeds import torch_generator
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.models.select import selected

A, B = "lora_A.weight", "lora_B.weight"
KINDS = ("query", "key", "value", "output", "mlp")  # whose projections can be adapted


@dataclass(frozen=True)
class LoraHook:
    """The hook that adds s·BA to the projection's output; dropout applies to A's input."""

    scale: float
    dropout: float

    def __call__(self, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        read = functional.dropout(inputs[0], self.dropout, training=module.training)
        return output + self.scale * module.lora_B(module.lora_A(read))


def sizes(module: Any) -> tuple[int, int]:
    """(in, out) of a projection; the weight of a Conv1D is transposed."""
    rows, columns = module.weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def inject(
    model: nn.Module,
    roles: Mapping[str, Role],
    words: Sequence[str],
    layers: Sequence[int] | None,
    *,
    rank: int,
    scale: float,
    dropout: float,
    seed: int,
) -> None:
    """Add adapters to the projections selected by the words, in these layers (None: in all)."""
    found = [name for name in targets(model, roles, words) if layers is None or roles[name].layer in layers]
    if not found:
        raise UserError(
            "This model has no projections for adapters (adapter.targets, adapter.layers): choose others, a "
            "Transformer, or adapter=none."
        )
    own = dict(roles)
    for name in found:
        path = name.removesuffix(".weight")
        module: Any = model.get_submodule(path)
        read, given = sizes(module)
        if rank > min(read, given):
            raise UserError(
                f"adapter.rank={rank} is more than {path} has, whose {read} inputs and {given} outputs make "
                f"no rank above {min(read, given)}: lower it."
            )
        like = module.weight
        start = fresh(f"{path}.{A}", (rank, read), seed, 0).to(like)
        module.lora_A = _layer(start)
        module.lora_B = _layer(torch.zeros(given, rank, dtype=like.dtype, device=like.device))
        module.register_forward_hook(LoraHook(scale, dropout))
        own |= dict.fromkeys((f"{path}.{A}", f"{path}.{B}"), replace(roles[name], adapter=True))
    model.roles = own  # type: ignore[assignment]


def targets(model: nn.Module, roles: Mapping[str, Role], words: Sequence[str]) -> list[str]:
    """The weights of the projections selected by the words; `all` selects those in all layers."""
    inner = {name: role for name, role in roles.items() if role.kind in KINDS and role.layer is not None}
    projections = {
        name: role
        for name, role in inner.items()
        if name.endswith(".weight")
        and isinstance(model.get_submodule(name.removesuffix(".weight")), nn.Linear | Conv1D)
    }
    for word in words:
        if word.partition(".")[0] not in (*KINDS, "all", "kernel", "layer"):
            raise UserError(
                f"adapter.targets names '{word}', which has no projection to adapt: choose of "
                f"{', '.join(KINDS)}, kernel, all, layer.N, or a role with its layer, such as value.0."
            )
    return selected(words, projections, "adapter.targets") if projections else []


def fresh(name: str, shape: tuple[int, int], seed: int, number: int) -> Tensor:
    """A's initial value before round `number` + 1: Kaiming uniform with a = √5, as in peft."""
    bound = 1 / math.sqrt(shape[1])
    generator = torch_generator(seed, "adapter", name, number)
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * bound


def _layer(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):  # the constructor would use torch's global generator
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight)
    return layer


# Names ---------------------------------------------------------------------------------------------------


def is_adapter(name: str) -> bool:
    return name.endswith((f".{A}", f".{B}"))


def adapted(names: Iterable[str]) -> list[str]:
    """The paths of the projections with adapters among these names."""
    return [name.removesuffix(f".{A}") for name in names if name.endswith(f".{A}") and "/" not in name]


# Ranks ---------------------------------------------------------------------------------------------------


def narrowed(name: str, array: Tensor, rank: int) -> Tensor:
    """The first rows of A, or columns of B: a copy."""
    part = array[:rank] if name.endswith(A) else array[:, :rank]
    return part.clone(memory_format=torch.contiguous_format)


def widened(name: str, array: Tensor, shape: Sequence[int]) -> Tensor:
    """The array padded with zeros to `shape`; `ValueError` if the shapes differ in more than the rank."""
    axis = 0 if name.endswith(A) else 1
    fits = array.ndim == 2 and array.shape[1 - axis] == shape[1 - axis]
    if not (fits and is_adapter(name) and 0 < array.shape[axis] <= shape[axis]):
        raise ValueError(f"{name} has the shape {tuple(array.shape)}, not {tuple(shape)}")
    whole = array.new_zeros(tuple(shape))
    whole.narrow(axis, 0, array.shape[axis]).copy_(array)
    return whole


# Merged deltas -------------------------------------------------------------------------------------------


def merged_delta_of(number: int, path: str, outer: Tensor, inner: Tensor) -> dict[str, Tensor]:
    """The delta of a weight: outer (out, R) · inner (R, in), as these factors or as their product."""
    if outer.numel() + inner.numel() < outer.shape[0] * inner.shape[1]:
        return {
            merged_delta_name(number, f"{path}.{A}"): inner,
            merged_delta_name(number, f"{path}.{B}"): outer,
        }
    return {merged_delta_name(number, f"{path}.weight"): product(outer, inner)}


def product(outer: Tensor, inner: Tensor) -> Tensor:
    """outer · inner, computed in float64 and cast back to their type."""
    return (outer.double() @ inner.double()).to(outer.dtype)


def merged_deltas_by_path(arrays: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Each projection's merged deltas in the order of rounds."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in sorted(filter(is_merged_delta, arrays), key=round_of):
        path = name.partition("/")[2]
        for end in (f".{A}", f".{B}", ".weight"):
            if path.endswith(end):
                path = path.removesuffix(end)
                break
        found.setdefault(path, {})[name] = arrays[name]
    return found


def sum_of(merged_deltas: Mapping[str, Tensor]) -> Tensor:
    """(out, in) in float64: the sum of one projection's merged deltas."""
    return torch.stack(list(_dense(merged_deltas))).sum(dim=0)


def _dense(merged_deltas: Mapping[str, Tensor]) -> Iterator[Tensor]:
    for name, array in merged_deltas.items():
        if name.endswith(f".{A}"):
            outer = merged_deltas[name.removesuffix(A) + B]
            if outer.ndim != 2 or array.ndim != 2 or outer.shape[1] != array.shape[0]:
                raise ValueError(f"{name} and what goes with it make no product")
            yield outer.double() @ array.double()
        elif not name.endswith(f".{B}"):
            yield array.double()


def change_of(module: Any) -> Tensor:
    """(out, in) in float64: s·BA of a projection with adapters."""
    scale = next(hook.scale for hook in module._forward_hooks.values() if isinstance(hook, LoraHook))
    return scale * (module.lora_B.weight.detach().double() @ module.lora_A.weight.detach().double())


def added_to(weight: Tensor, change: Tensor, module: nn.Module) -> Tensor:
    """The projection's weight plus a change (out, in)."""
    change = change.T if isinstance(module, Conv1D) else change
    if change.shape != weight.shape:
        raise ValueError(f"a change {tuple(change.shape)} does not fit a weight {tuple(weight.shape)}")
    return (weight.double() + change).to(weight.dtype)
