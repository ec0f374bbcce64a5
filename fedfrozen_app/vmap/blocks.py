"""Compile a model's repeated blocks once: all layers of a Transformer are one graph with different weights.

Compiling a step of twelve layers as a whole takes minutes, one layer seconds. Within `used` the blocks of a
model are computed outside the `vmap` over clients, on the stacked tensors of all. A first pass records how
blocks are called, and one graph is compiled for all equal calls. Graphs are kept for later steps: after a
freeze only changed calls are compiled again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fedfrozen_app.vmap.model_modes import with_forwards
from fedfrozen_app.vmap.vmap_escape import Axes, any_mapped, is_mapped, outside_vmap

BACKEND = "inductor"
OPTIONS: dict[str, dict[str, Any]] = {"inductor": {"deterministic": True}}  # by backend
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)  # may be constants of a graph
A_TENSOR = object()  # a placeholder for a tensor
PLACE = "layer_idx"  # transformers' layer index, by which a layer finds its part of a cache


@dataclass(frozen=True)
class Call:
    """A call of a block. Its tensors are one flat list: parameters and buffers, then arguments."""

    block: int  # the first of the equal blocks
    names: tuple[str, ...]  # of the parameters and buffers
    arguments: int  # an index into `Blocks._arguments`
    axes: tuple[Axes, ...] = ()  # of each vmap that maps over any tensor, innermost first

    def within(self, axes: Axes) -> "Call":
        return replace(self, axes=(*self.axes, axes)) if any_mapped(axes) else self


@dataclass(frozen=True)
class Arguments:
    """A block's arguments other than tensors."""

    structure: pytree.TreeSpec
    others: tuple[Any, ...]  # with A_TENSOR in the places of tensors
    autocast: torch.dtype | None
    training: bool


class Blocks:
    """The repeated blocks of one model, and their compiled graphs."""

    def __init__(self, model: nn.Module) -> None:
        self._config: Any = getattr(model, "config", None)
        self._blocks = [block for stack in outermost_lists(model) for block in stack]
        first: dict[Any, int] = {}
        self._alike = [first.setdefault(_kind(block), number) for number, block in enumerate(self._blocks)]
        self._arguments: list[Arguments] = []
        self._compiled: dict[Any, Callable[..., tuple[Tensor, ...]]] = {}
        self._noted: dict[Any, tuple[Call, list[Tensor]]] | None = None
        self._returns: dict[tuple[int, int], pytree.TreeSpec] = {}  # by block and arguments
        self.missed = 0  # calls without a compiled graph, while others have one

    @property
    def repeat(self) -> bool:
        """Whether some blocks are equal, so that one graph serves several."""
        return self.kinds < len(self._alike)

    @property
    def kinds(self) -> int:
        """The number of distinct blocks."""
        return len(set(self._alike))

    @property
    def graphs(self) -> int:
        return len(self._compiled)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within it the model's blocks run compiled, if they are compiled.

        Disables the key-value cache, which blocks would fill for nothing.
        """
        cache = getattr(self._config, "use_cache", None)
        if cache:
            self._config.use_cache = False
        try:
            with with_forwards({b: partial(self._forward, number) for number, b in enumerate(self._blocks)}):
                yield
        finally:
            if cache:
                self._config.use_cache = cache

    def compile_for(self, run: Callable[[], Any]) -> int:
        """Compile all block calls of `run` within `used`, forward and backward; returns how many are new."""
        self._noted = {}
        try:
            run()
            noted = self._noted
        finally:
            self._noted = None
        for key, (call, tensors) in noted.items():
            # Traced first: torch.compile can trace neither vmap nor transformers' Python code.
            with _autocast(tensors, self._arguments[call.arguments].autocast), torch.enable_grad():
                traced = make_fx(partial(self._run, call))(*tensors)
            compiled = compiled_by_torch(traced)
            with torch.enable_grad():
                _forwards_and_backwards(compiled, tensors)
            self._compiled[key] = compiled
        return len(noted)

    def _forward(self, number: int, *args: Any, **kwargs: Any) -> Any:
        block = self._blocks[number]
        own = dict(block.named_parameters()) | dict(block.named_buffers())
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [*own.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        others = tuple(A_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        # With an argument that it may change, such as a cache, or without any per-client tensor.
        unfit = not all(other is A_TENSOR or isinstance(other, PLAIN) for other in others)
        if unfit or not any(is_batchedtensor(tensor) for tensor in tensors):
            return self._as_it_is(number, lambda: block(*args, **kwargs))
        device = tensors[0].device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        arguments = self._number_of(Arguments(structure, others, autocast, block.training))
        call = Call(self._alike[number], tuple(own), arguments)
        results = self._outside(call, tensors)
        return pytree.tree_unflatten(results, self._returns[call.block, arguments])

    def _number_of(self, arguments: Arguments) -> int:
        """The index of these arguments. Compared, not hashed: a structure contains lists."""
        if arguments not in self._arguments:
            self._arguments.append(arguments)
        return self._arguments.index(arguments)

    def _as_it_is(self, number: int, run: Callable[[], Any]) -> Any:
        """Call `run` with the block's own forward, not this class's."""
        block = self._blocks[number]
        ours = block.__dict__.pop("forward", None)
        try:
            return run()
        finally:
            if ours is not None:
                block.forward = ours

    def _one(self, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the block for one client."""
        block, given, count = self._blocks[call.block], self._arguments[call.arguments], len(call.names)
        rest = iter(tensors[count:])
        leaves = [next(rest) if other is A_TENSOR else other for other in given.others]
        args, kwargs = pytree.tree_unflatten(leaves, given.structure)
        own = dict(zip(call.names, tensors[:count], strict=True))
        found = self._as_it_is(call.block, lambda: functional_call(block, own, args, kwargs))
        results, self._returns[call.block, call.arguments] = pytree.tree_flatten(found)
        return tuple(results)

    def _run(self, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Compute the block for all clients."""
        run: Callable[..., tuple[Tensor, ...]] = partial(self._one, call)
        for axes in call.axes:
            run = vmap(run, in_dims=axes, randomness="different")
        return run(*tensors)

    def _outside(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute the block outside all vmaps, over clients and over runs."""
        if not is_mapped():
            return self._stacked(call, tensors)
        return outside_vmap(lambda whole, axes: self._outside(call.within(axes), whole), *tensors)

    def _stacked(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute the block with plain tensors: no vmap is active any more."""
        key = (call, torch.is_grad_enabled(), tuple(_described(tensor) for tensor in tensors))
        if (compiled := self._compiled.get(key)) is not None:
            with _autocast(tensors, None):  # the traced graph contains its casts
                return compiled(*tensors)
        if self._noted is None:
            self.missed += bool(self._compiled)
        elif key not in self._noted:
            self._noted[key] = call, [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        return self._run(call, *tensors)


def compiled_by_torch(run: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with static sizes: a replayed graph has no others. Deterministic: no autotuning, which could
    choose another order of summation, and so give other bits, each time."""
    return torch.compile(run, dynamic=False, backend=BACKEND, options=OPTIONS.get(BACKEND))


def outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from outermost_lists(child)


def _kind(block: nn.Module) -> Any:
    """A key that is equal for blocks that compute the same with different weights."""
    return tuple((name, *_kind_of_part(part)) for name, part in block.named_modules())


def _kind_of_part(part: nn.Module) -> Any:
    arrays = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
    shapes = tuple((name, tuple(value.shape), value.dtype) for name, value in arrays)
    by_place = getattr(part, "scale_attn_by_inverse_layer_idx", False)  # of GPT-2
    own = {key: value for key, value in vars(part).items() if not key.startswith("_")}
    own = {key: value for key, value in own.items() if key not in ("training", "forward")}
    if not by_place:
        own.pop(PLACE, None)
    settings = ((key, value if isinstance(value, PLAIN) else _identity(value)) for key, value in own.items())
    return type(part), shapes, tuple(sorted(settings, key=lambda pair: pair[0]))


def _identity(value: Any) -> Any:
    """A key for an attribute other than modules, arrays and plain values: the object, or a list of keys."""
    return repr(value) if isinstance(value, (list, tuple, torch.Size)) else id(value)


def _described(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _autocast(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> torch.autocast:
    device = tensors[0].device.type
    return torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def _forwards_and_backwards(run: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor]) -> None:
    results = [result for result in run(*tensors) if result.requires_grad]
    sources = [tensor for tensor in tensors if tensor.requires_grad]
    if results:
        torch.autograd.grad(results, sources, [torch.ones_like(r) for r in results], allow_unused=True)
