"""The part of a model under everything that trains: read once for many rows, as one batch.

Gradients of single examples are taken one by one, which makes every step of the model small. What nothing
trains needs none of that.
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

from fedfrozen_app.models.blocks import outermost_lists
from fedfrozen_app.models.meanwhile import judging, with_forwards
from fedfrozen_app.models.task import Batch, Task

PROBE = 2  # rows on which a trunk is tried


@dataclass(frozen=True)
class Trunk:
    """Modules that run one after another, of which the last gives what is read."""

    parts: tuple[nn.Module, ...]
    above: tuple[nn.Module, ...] = ()  # give the like of it, and need not run where it is all that is wanted


def frozen_trunk(model: nn.Module, trained: Collection[str]) -> Trunk | None:
    """What transformers calls the base model, or its encoder where what pools its states trains too, or the
    layers before the first that trains. None where there is none, or where rows would see one another."""
    prefix: str = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else None
    inside = [name for name in trained if name.startswith(f"{prefix}.")]
    trunk: Trunk | None
    if inside and not all(name.startswith(f"{prefix}.pooler.") for name in inside):
        trunk = _layers_before(model, trained)
    else:
        whole = getattr(base, "encoder", None) if inside else base
        trunk = Trunk((whole,)) if isinstance(whole, nn.Module) else None
    parts = () if trunk is None else trunk.parts
    mixes = any(isinstance(each, _BatchNorm) for part in parts for each in part.modules())
    return None if mixes else trunk


def _layers_before(model: nn.Module, trained: Collection[str]) -> Trunk | None:
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
    return Trunk(tuple(layers[:first]), tuple(layers[first:])) if first else None


_known: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], bool]] = WeakKeyDictionary()


def holds(trunk: Trunk, model: nn.Module, task: Task, batch: Batch, trained: Sequence[str]) -> bool:
    """Whether nothing that trains is in what the trunk gives, and the model needs nothing else of it: tried
    once with a few rows, because models may look back at any layer."""
    known, key = _known.setdefault(model, {}), tuple(trained)
    if key not in known:
        few = Batch({name: value[:PROBE] for name, value in batch.inputs.items()}, batch.labels[:PROBE])
        with judging(model):
            known[key] = _tried(trunk, model, task, few, trained)
    return known[key]


def _tried(trunk: Trunk, model: nn.Module, task: Task, batch: Batch, trained: Sequence[str]) -> bool:
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    trains = {name: parameters[name].clone().requires_grad_() for name in trained}
    with torch.enable_grad(), _noting(trunk.parts[-1]) as given:
        said = task.logits({**parameters, **trains}, batch)
    if not given or any(not isinstance(leaf, Tensor) for leaf in tree_leaves(given[-1])):
        return False
    read = tree_leaves(given[-1])
    if any(leaf.requires_grad or len(leaf) != len(batch.labels) for leaf in read):
        return False
    with torch.no_grad(), answering(trunk.parts, given[-1]):
        again = task.logits({}, batch)
    # Not by what these rows are: a private one that overflows must change nothing for others.
    return torch.allclose(said, again, rtol=1e-3, atol=1e-5, equal_nan=True)


@torch.no_grad()
def read_by(trunk: Trunk, task: Task, batch: Batch) -> Any:
    """What the trunk gives for these rows, with the model as it is loaded."""
    with _noting(trunk.parts[-1]) as given, _passing_on(trunk.above, given):
        task.logits({}, batch)
    return given[-1]


@contextmanager
def _noting(module: nn.Module) -> Iterator[list[Any]]:
    """All that it gives within the block."""
    given: list[Any] = []
    hook = module.register_forward_hook(lambda module, inputs, output: given.append(output))
    try:
        yield given
    finally:
        hook.remove()


def _passing_on(above: Sequence[nn.Module], given: Sequence[Any]) -> AbstractContextManager[None]:
    """Within it they give what was given last."""
    return with_forwards(dict.fromkeys(above, lambda *args, **named: given[-1]))


def answering(parts: Sequence[nn.Module], answer: Any) -> AbstractContextManager[None]:
    """Within it they give this, whatever they are asked."""
    return with_forwards(dict.fromkeys(parts, lambda *args, **named: answer))
