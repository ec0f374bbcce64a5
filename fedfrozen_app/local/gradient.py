"""The gradient of stacked clients: turn each client's pure loss into one function of tensors.

The clients' losses are computed under `vmap`. Frozen parameters are the worker model's own, stored once for
all clients. If clients of several runs share a step (local/stack.py), they are stored once per run.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from fedfrozen_app.core.formatting import format_error
from fedfrozen_app.data.augment import taken
from fedfrozen_app.exchange.names import parameter_of, parameters_in
from fedfrozen_app.local.algorithm import Algorithm
from fedfrozen_app.local.compiling import Compiling, keep_what_is_compiled
from fedfrozen_app.local.layouts import NO_START, Layouts
from fedfrozen_app.local.loss_errors import checked_losses
from fedfrozen_app.local.mapped_task import mapped_task
from fedfrozen_app.local.parts import parts_of
from fedfrozen_app.local.step_arrays import StepArrays
from fedfrozen_app.models.task import Batch, Inputs, Parameters
from fedfrozen_app.vmap.attention import folded
from fedfrozen_app.vmap.blocks import Blocks, compiled_by_torch
from fedfrozen_app.vmap.convolution import product_ways
from fedfrozen_app.vmap.factored_gradients import FactoredGradients, Factors, keep_factored
from fedfrozen_app.vmap.model_modes import with_forwards
from fedfrozen_app.vmap.per_client_products import GradientBuffer, offered, per_client_products

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

log = logging.getLogger(__name__)
ByParameter = tuple[Mapping[str, Tensor], Mapping[str, Factors]]  # full gradients, and factored ones
# From the clients' rows and everything else that a step reads: losses, and gradients as (slots, width) or by
# parameter.
GradientFunction = Callable[..., tuple[Tensor, Any]]


class StackedGradient:
    """Losses and gradients of the clients in a step's slots.

    `wide`: weights whose gradients may stay factored; after the function is built, those whose gradients do.
    """

    def __init__(
        self,
        worker: "Worker",
        layouts: Layouts,
        arrays: StepArrays,
        method: Algorithm,
        *,
        mode: str,
        runs: int,
        wide: list[str],
    ) -> None:
        self._worker, self._layouts, self._arrays, self._method = worker, layouts, arrays, method
        self.mode, self._runs, self.wide = mode, runs, wide
        self._blocks: Blocks | None = None  # the compiled blocks
        self._products: dict[bool, dict[nn.Module, Callable[..., Any]]] = {}
        self._function: GradientFunction | None = None

    def __call__(self, index: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        """(slots, reported losses) on rows `index`, (slots, batch), of which `mask` marks the real ones; and
        their gradients, by parameter where some of them are factored (`wide`)."""
        if self._function is None:
            self._function = self._make(index, mask)
        return self._function(self._arrays.rows, *self._fixed(), index, mask)

    def do_without_compiling(self, error: Exception) -> None:
        """Stop using compiled code, which is optional, for all later steps."""
        self._blocks, self.mode, self._function = None, "captured", None
        self._worker.kept.for_run(Compiling).failed()
        log.warning("The step could not be compiled, and continues without: %s", format_error(error))

    @property
    def _on_gpu(self) -> bool:
        return self._worker.device.type == "cuda"

    def _fixed(self) -> list[Tensor]:
        """The tensors that a step reads and never writes: the worker's parameters, then labels and inputs."""
        table, arrays = self._worker.train_table, self._arrays
        parameters = {name: value.detach() for name, value in self._worker.parameters.items()}
        return [
            *(parameters | arrays.models).values(),
            table.labels,
            *table.inputs.values(),
            arrays.class_weights,
            arrays.held,
            arrays.from_server,
        ]

    # The clients' losses -------------------------------------------------------------------------------

    def _losses(self, flat: Tensor, parts: Parameters, fixed: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """From the clients' rows and the arrays in them: (slots,) the losses that the steps minimise, and
        (slots, reported losses). `fixed` ends with index and mask."""
        names, keys = list(self._worker.parameters), list(self._worker.train_table.inputs)
        model = dict(zip(names, fixed, strict=False))
        labels, columns = fixed[len(names)], dict(zip(keys, fixed[len(names) + 1 :], strict=False))
        class_weights, held, from_server, index, mask = fixed[-5:]
        rows = (flat, parts, class_weights, held, index, mask)
        if self._runs == 1:
            return self._losses_of_run(model, from_server[0], columns, labels, *rows)
        lead = (self._runs, self._arrays.size // self._runs)
        by_run = [tree_map(lambda part: part.unflatten(0, lead), part) for part in rows]
        axes = {name: 0 if name in self._arrays.models else None for name in model}
        over_runs = vmap(
            self._losses_of_run, in_dims=(axes, 0, None, None, *(0 for _ in rows)), randomness="different"
        )
        found = over_runs(model, from_server, columns, labels, *by_run)
        return found[0].flatten(), found[1].flatten(0, 1)

    def _losses_of_run(
        self, model: Parameters, from_server: Tensor, columns: Inputs, labels: Tensor, *rows: Any
    ) -> tuple[Tensor, Tensor]:
        """(clients,) the losses of one run's clients, and (clients, reported losses)."""
        worker, layouts, method = self._worker, self._layouts, self._method
        plain, augmented = method.is_plain(), worker.data.augments
        common = worker.rounded - {*layouts.names, *map(parameter_of, layouts.held.names)}
        frozen = {name: model[name].bfloat16() for name in common}

        def one(
            row: Tensor, parts: Parameters, weights: Tensor, held: Tensor, index: Tensor, mask: Tensor
        ) -> Any:
            examples = taken(columns, labels, index, augmented=augmented)
            batch = Batch(*examples, weights, mask)
            own_model = {**model, **layouts.untrained(held)}
            if plain:
                task = mapped_task(worker, {**own_model, **frozen})
                return method.loss(parameters_in(parts), batch, task, NO_START)
            # An algorithm computes with the exact arrays; the model reads the rounded ones.
            parameters = parameters_in(layouts.trained.views(row))
            task = mapped_task(worker, own_model, {**frozen, **parts}, parameters)
            start = layouts.start(own_model, row, held, from_server)
            loss, own = checked_losses(method, parameters, batch, task, start)
            return loss, torch.stack([own, loss.detach() - own])

        found = vmap(one, randomness="different")(*rows)
        return (found, found.detach().unsqueeze(-1)) if plain else found

    # Their gradients -----------------------------------------------------------------------------------

    def _whole(self, flat: Tensor, *fixed: Tensor) -> tuple[Tensor, Tensor]:
        """(slots, reported losses), and the gradient, (slots, width)."""
        plain, rounded = self._method.is_plain(), self._worker.rounded
        flat = flat.detach().requires_grad_(True)
        parts: Parameters = {}
        room = GradientBuffer(rounded_only=not plain)
        if plain or rounded:
            traced = self.mode == "compiled"
            parts = parts_of(flat, self._layouts.trained, rounded, traced=traced, room=room)
        if not plain:
            parts = {name: part for name, part in parts.items() if name in rounded}
        with offered(room):
            losses, reported = self._losses(flat, parts, fixed)
        (gradient,) = torch.autograd.grad(losses.sum(), flat)
        return reported, gradient

    def _by_parameter(self, flat: Tensor, *fixed: Tensor) -> tuple[Tensor, ByParameter]:
        """(slots, reported losses), and each parameter's gradient: those of wide layers as factors."""
        views = self._layouts.trained.views(flat)
        parts = {name: part.detach().requires_grad_() for name, part in views.items()}
        factored = FactoredGradients(parts)
        with keep_factored(factored):
            losses, reported = self._losses(flat, parts, fixed)
        gradients = torch.autograd.grad(losses.sum(), list(parts.values()), allow_unused=True)
        found = {name: own for name, own in zip(parts, gradients, strict=True) if own is not None}
        return reported, (found, factored.factors)

    def _make(self, index: Tensor, mask: Tensor) -> GradientFunction:
        function: GradientFunction = self._whole
        rows = self._arrays.rows
        if self.wide:
            with torch.random.fork_rng([rows.device] if self._on_gpu else []):  # a trial run, not a step
                _, (_, factors) = self._rewritten(self._by_parameter, rows, *self._fixed(), index, mask)
            self.wide = list(factors)
            function = self._by_parameter if factors else self._whole
        if self.mode in ("compiled", "blocks"):
            return self._compiled(function, index, mask)
        return partial(self._rewritten, function)

    def _rewritten(self, function: GradientFunction, *arguments: Tensor) -> tuple[Tensor, Any]:
        with self._rewrites():
            return function(*arguments)

    @contextmanager
    def _rewrites(self) -> Iterator[None]:
        """Context in which the model uses implementations that are fast under a vmap over clients."""
        module, names = self._worker.model, self._layouts.names
        blocks = self._blocks.used() if self._blocks is not None else nullcontext()
        views = self._on_gpu and self.mode != "compiled"
        if views not in self._products:  # cached: the lookup takes almost as long as a small model's step
            self._products[views] = product_ways(module, names, views=views)
        products = with_forwards(self._products[views])
        own = partial(self._worker.per_client_kernels.used, names)
        ways = {"captured": own, "compiled": partial(own, traced=True)}
        kernels = ways.get(self.mode, nullcontext)()
        wide = per_client_products(module, self.wide)
        with folded(module), products, wide, kernels, blocks, torch.enable_grad():
            yield

    def _compiled(self, function: GradientFunction, index: Tensor, mask: Tensor) -> GradientFunction:
        """The same function compiled, or with compiled blocks.
        A compiler can fail in any way. Compiling is optional: the step then runs uncompiled.
        """
        arguments = (self._arrays.rows, *self._fixed(), index, mask)
        keep_what_is_compiled(self._worker.device)
        blocks = self._worker.blocks
        try:
            if self.mode == "blocks":
                self._blocks = blocks
                with self._rewrites():
                    blocks.compile_for(lambda: function(*arguments))
                return partial(self._rewritten, function)
            with self._rewrites():
                traced = make_fx(function)(*arguments)
            compiled = compiled_by_torch(traced)
            compiled(*arguments)
            return compiled
        except Exception as error:  # noqa: BLE001  (see above)
            self.do_without_compiling(error)
            return partial(self._rewritten, function)
