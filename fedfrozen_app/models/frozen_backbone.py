"""Compute the frozen part of a model below all trained layers once for many rows, as one batch.

Per-example gradients make every operation of the model small. The frozen part needs no gradient, so it can
run on all rows at once.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from fedfrozen_app.models.task import Batch, Task
from fedfrozen_app.vmap.blocks import outermost_lists
from fedfrozen_app.vmap.model_modes import evaluation_mode, with_forwards

PROBE = 2  # rows on which a backbone is tested


@dataclass(frozen=True)
class FrozenBackbone:
    """Modules that run one after another; the output of the last is reused."""

    parts: tuple[nn.Module, ...]
    above: tuple[
        nn.Module, ...
    ] = ()  # return the same kind of output, and are skipped if only the backbone's is needed


def frozen_backbone(model: nn.Module, trained: Collection[str]) -> FrozenBackbone | None:
    """The base model of transformers, or its encoder if the pooler trains, too, or the layers before the
    first trained one. None if there is none, or if rows of a batch influence each other (batch norm)."""
    prefix: str = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else None
    inside = [name for name in trained if name.startswith(f"{prefix}.")]
    backbone: FrozenBackbone | None
    if inside and not all(name.startswith(f"{prefix}.pooler.") for name in inside):
        backbone = _layers_before(model, trained)
    else:
        whole = getattr(base, "encoder", None) if inside else base
        backbone = FrozenBackbone((whole,)) if isinstance(whole, nn.Module) else None
    parts = () if backbone is None else backbone.parts
    mixes = any(isinstance(each, _BatchNorm) for part in parts for each in part.modules())
    return None if mixes else backbone


def _layers_before(model: nn.Module, trained: Collection[str]) -> FrozenBackbone | None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    wanted = set(trained)
    stacks = []
    for stack in outermost_lists(model):
        trains = [any(names[own] in wanted for own in layer.parameters()) for layer in stack]
        if any(trains):
            stacks.append((list(stack), trains.index(True)))
    if len(stacks) != 1:
        return None
    ((layers, first),) = stacks
    return FrozenBackbone(tuple(layers[:first]), tuple(layers[first:])) if first else None


_known: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], bool]] = WeakKeyDictionary()


def can_precompute(
    backbone: FrozenBackbone, model: nn.Module, task: Task, batch: Batch, trained: Sequence[str]
) -> bool:
    """Whether the backbone's output depends on no trained parameter, and the model reads nothing else of it.
    Tested once with a few rows, because models may read any earlier layer."""
    known, key = _known.setdefault(model, {}), tuple(trained)
    if key not in known:
        few = Batch({name: value[:PROBE] for name, value in batch.inputs.items()}, batch.labels[:PROBE])
        with evaluation_mode(model):
            known[key] = _is_same_output(backbone, model, task, few, trained)
    return known[key]


def _is_same_output(
    backbone: FrozenBackbone, model: nn.Module, task: Task, batch: Batch, trained: Sequence[str]
) -> bool:
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    trains = {name: parameters[name].clone().requires_grad_() for name in trained}
    with torch.enable_grad(), _recorded_outputs(backbone.parts[-1]) as given:
        expected = task.logits({**parameters, **trains}, batch)
    if not given or any(not isinstance(leaf, Tensor) for leaf in tree_leaves(given[-1])):
        return False
    read = tree_leaves(given[-1])
    if any(leaf.requires_grad or len(leaf) != len(batch.labels) for leaf in read):
        return False
    with torch.no_grad(), returning(backbone.parts, given[-1]):
        again = task.logits({}, batch)
    # NaN equals NaN: a private row that overflows must not affect others.
    return torch.allclose(expected, again, rtol=1e-3, atol=1e-5, equal_nan=True)


@torch.no_grad()
def backbone_output(backbone: FrozenBackbone, task: Task, batch: Batch) -> Any:
    """The backbone's output for these rows, with the loaded model."""
    with _recorded_outputs(backbone.parts[-1]) as given, _returning_last(backbone.above, given):
        task.logits({}, batch)
    return given[-1]


@contextmanager
def _recorded_outputs(module: nn.Module) -> Iterator[list[Any]]:
    """Record the module's outputs within the block, in order."""
    given: list[Any] = []
    hook = module.register_forward_hook(lambda module, inputs, output: given.append(output))
    try:
        yield given
    finally:
        hook.remove()


def _returning_last(above: Sequence[nn.Module], given: Sequence[Any]) -> AbstractContextManager[None]:
    """Within the block these modules return the last recorded output."""
    return with_forwards(dict.fromkeys(above, lambda *args, **named: given[-1]))


def returning(parts: Sequence[nn.Module], output: Any) -> AbstractContextManager[None]:
    """Within the block these modules return `output`, whatever their inputs."""
    return with_forwards(dict.fromkeys(parts, lambda *args, **named: output))
