"""One optimiser step of several clients at once, which the runners replay.

Each client's trained parameters are a row of one matrix. A step is the clients' own pure step under `vmap`,
traced once to plain tensor operations, compiled on a GPU and replayed there as a CUDA graph. Frozen
parameters are the resident model's own: held once, whatever the number of clients. Where clients of several
runs share a step (local/stack.py), they are held once for each run.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from fedfrozen_app.data.augment import taken
from fedfrozen_app.devices import sent
from fedfrozen_app.exchange.block import Layout
from fedfrozen_app.exchange.names import (
    by_namespace,
    flattened,
    names_in_namespaces,
    namespace_of,
    parameter_of,
    parameters_in,
)
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.local.algorithm import Finished, Start
from fedfrozen_app.local.compiling import keep_what_is_compiled
from fedfrozen_app.local.parts import parts_of
from fedfrozen_app.local.recording import recorded
from fedfrozen_app.local.sequential import learning_rate, make_optimizer, rate_scales
from fedfrozen_app.local.slots import Schedule, Turn
from fedfrozen_app.models.attention import folded
from fedfrozen_app.models.blocks import Blocks, compiled_by_torch
from fedfrozen_app.models.convolution import as_products, product_ways
from fedfrozen_app.models.masks import with_ready_mask
from fedfrozen_app.models.meanwhile import judging, with_forwards
from fedfrozen_app.models.own_products import Room, offered, own_products
from fedfrozen_app.models.task import Batch, Inputs, Parameters, Task, called
from fedfrozen_app.models.thin import Factors, Thin, descend, thin_products, wide_layers
from fedfrozen_app.words import counted, told

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident

log = logging.getLogger(__name__)
Slopes = Mapping[str, Tensor]  # of each part of clients' rows
Gradient = Callable[..., tuple[Tensor, Any]]  # of clients' rows and all that a step reads: losses, slopes
DESCENT_ON = ("cuda",)  # kinds of devices where slopes of wide layers stay factors (models/thin.py)
WARMUP_STEPS = 1  # before a capture: lazy initialisations must not be recorded
_recording = Lock()  # where threads drive several GPUs: garbage is collected for all of them


NOTHING: Parameters = {}
NO_START = Start({}, ())  # plain training looks at no start: none is laid out
START = "start"  # the namespace of the private parameters with which a client began its round


@dataclass(frozen=True)
class Layouts:
    """Where the arrays of a client lie: in a row of what it trains, and in one of what it only reads."""

    trained: Layout  # parameters, and what the algorithm trains beside them
    held: Layout  # what the client keeps, and private parameters: untrained, or as the round began
    from_order: Layout  # what came with the order: the same for all clients
    names: tuple[str, ...]  # the parameters among `trained`

    @classmethod
    def of(cls, resident: "Resident", order: Order, names: tuple[str, ...]) -> "Layouts":
        """`names` are the parameters that train, those that travel first."""
        method, plan = order.method, order.plan
        kept = [space for space in method.stays if space not in method.trains]
        began = [name for name in plan.private if name not in names or not method.is_plain()]
        return cls(
            trained=_layout(resident, [*names, *names_in_namespaces(method.trains, names)]),
            held=_layout(
                resident,
                [*names_in_namespaces(kept, names), *names_in_namespaces([START], began)],
                method.numbers,
            ),
            from_order=_layout(resident, names_in_namespaces(method.comes, plan.shared)),
            names=names,
        )

    def untrained(self, held: Tensor) -> dict[str, Tensor]:
        """The client's private parameters that do not train."""
        private = by_namespace(self.held.views(held)).get(START, {})
        return {name: value for name, value in private.items() if name not in self.names}

    def start(self, model: Parameters, row: Tensor, held: Tensor, from_order: Tensor) -> Start:
        """One client's start out of its rows; what the algorithm trains is what trains now."""
        own = by_namespace(self.held.views(held)) | by_namespace(self.trained.views(row))
        private = own.pop(START, {})
        return Start({**model, **private}, self.names, by_namespace(self.from_order.views(from_order)), own)


def _layout(resident: "Resident", names: Sequence[str], numbers: Collection[str] = ()) -> Layout:
    """Of the shapes of the parameters; in the namespaces `numbers` of a single number each."""
    arrays = {name: resident.parameters[parameter_of(name)] for name in names}
    one = torch.zeros(())
    return Layout.of({name: one if namespace_of(name) in numbers else a for name, a in arrays.items()})


def loaded(resident: "Resident", layout: Layout) -> Tensor:
    """(width,) the model as it is loaded: where a client starts that keeps nothing of its own."""
    return layout.flatten({name: resident.parameters[parameter_of(name)] for name in layout.names})


class Step:
    """One optimiser step of the clients in its slots.

    `mode`: "eager", or on a GPU "captured" (a CUDA graph of the same kernels), "compiled" (traced to plain
    tensor operations and compiled first, then captured) or "blocks" (the same with its blocks alone).
    `runs` share it, each with as many of the slots.
    """

    def __init__(
        self, resident: "Resident", layouts: Layouts, size: int, order: Order, *, mode: str, runs: int = 1
    ) -> None:
        self.resident, self.layouts, self.size, self.mode = resident, layouts, size, mode
        self.runs = runs
        self.layout = layouts.trained
        self.on_gpu = resident.device.type == "cuda"
        like: dict[str, Any] = {"dtype": resident.task.dtype, "device": resident.device}
        self.flat = torch.zeros(size, self.layout.width, **like)
        self.held = torch.zeros(size, layouts.held.width, **like)
        self.from_order = torch.zeros(runs, layouts.from_order.width, **like)
        # Of several runs: what each reads and does not train, (runs, *shape) by name.
        self.models = self._room_for_models(order) if runs > 1 else {}
        self._held: list[dict[str, str | None]] = [{} for _ in range(runs)]  # its digests, by run
        # (slots, width) 1 where the slot's phase trains a column; None where a round has no phases.
        self.columns = torch.ones_like(self.flat) if len(order.plan.steps) > 1 else None
        # The optimiser counts the steps of each of its tensors, and clients come and go: one for each.
        self._rows = [row.requires_grad_(True) for row in self.flat.unbind()]
        self._done = 0  # steps of this round
        self.losses = torch.zeros(size, dtype=torch.float64, device=resident.device)
        self._losses = self.losses.unbind()
        self._method = order.method
        # (clients, classes); all ones where classes are not weighed: the mean over a batch stays the same.
        self.class_weights = torch.ones(size, len(resident.corpus.classes)).to(self.flat)
        self._shares = self._rate_shares()
        # How many columns the parameters take, and each namespace that trains beside them.
        spaces = groupby(zip(self.layout.names, self.layout.spans, strict=True), lambda c: namespace_of(c[0]))
        self._parts = [sum(span for _, span in columns) for _, columns in spaces]
        # The parameters that are rounded before a step, where training is in bf16.
        self._rounded = resident.rounded
        self._gradient: Gradient | None = None
        self.blocks: Blocks | None = None  # those that run compiled
        self._products: dict[bool, dict[nn.Module, Callable[..., Any]]] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        # A graph replays what it recorded: the rate is a tensor that later rounds change in place.
        self._rates = torch.ones(runs, device=resident.device)
        self._lr = self._rates.unbind()
        rates: Sequence[Any] = self._lr if self.on_gpu else [1.0] * runs
        each = size // runs
        groups = [
            {"params": self._rows[run * each : (run + 1) * each], "lr": rate}
            for run, rate in enumerate(rates)
        ]
        self.optimizer = make_optimizer(resident.config.client, groups, rates[0], capturable=self.on_gpu)
        # Weights whose slopes may stay factors, where a step is no more than rows − rate · slopes. Once its
        # gradient is made: those of which they do.
        self._wide = wide_layers(resident.model, layouts.names) if self._descends() else []

    @property
    def ready(self) -> bool:
        """Whether the next step is taken at once: nothing is recorded or compiled for it first."""
        return not self.on_gpu or self._graph is not None

    def _room_for_models(self, order: Order) -> dict[str, Tensor]:
        """Plain training looks at no start, and so at nothing of the model that trains."""
        unread = set(self.layouts.names) if order.method.is_plain() else set()
        exchanged = self.resident.exchanged.items()
        return {
            name: value.detach().new_zeros(self.runs, *value.shape)
            for name, value in exchanged
            if name not in unread
        }

    def _rate_shares(self) -> Tensor | None:
        """(width,) the learning rate of each column in units of `client.lr`; None where all have that."""
        scales = rate_scales(self.resident.config.client)
        shares = [scales.get(self.resident.roles[parameter_of(name)].kind, 1.0) for name in self.layout.names]
        if set(shares) <= {1.0}:
            return None
        spans = zip(shares, self.layout.spans, strict=True)
        # In float64 until the end: float32 would round a scale of 0.2 in a float64 model too.
        whole = [torch.full((span,), scale, dtype=torch.float64) for scale, span in spans]
        return torch.cat(whole).to(self.flat)

    def _descends(self) -> bool:
        """Whether an optimiser would take off what it is given, and that as it is."""
        client, task = self.resident.config.client, self.resident.task
        remembers = client.optimizer != "sgd" or client.momentum or client.weight_decay
        changes = client.clip is not None or self._shares is not None or self.columns is not None
        rounds = bool(self.resident.rounded) or task.dtype != self._rates.dtype
        on = self.resident.device.type in DESCENT_ON
        return on and self._method.is_plain() and not (remembers or changes or rounds)

    def begin(
        self,
        order: Order,
        from_order: Mapping[str, Tensor],
        run: int = 0,
        resident: "Resident | None" = None,
    ) -> None:
        """A round begins: nobody is in a slot yet. `from_order` is what came with the order.

        Where runs share the step: `run` begins with the model that its own resident has loaded.
        """
        self._done = 0
        resident = resident or self.resident
        if self.layouts.from_order.names:
            self.from_order[run].copy_(self.layouts.from_order.flatten(from_order))
        if self.models:
            self._take_model(order, run, resident)
        rate = learning_rate(resident.config.client, order.round, resident)
        self._lr[run].fill_(rate)
        if not self.on_gpu:
            self.optimizer.param_groups[run]["lr"] = rate

    def _take_model(self, order: Order, run: int, resident: "Resident") -> None:
        """What is there already, by digest, is left alone: a frozen array is copied once."""
        wanted = {name: order.base.get(name) for name in self.models}
        held = self._held[run]
        new = [name for name, digest in wanted.items() if digest is None or held.get(name) != digest]
        if new:
            with torch.no_grad():
                torch._foreach_copy_(
                    [self.models[name][run] for name in new],
                    [resident.parameters[name].detach() for name in new],
                )
        self._held[run] = wanted

    def admit(self, slots: Sequence[int], starts: Sequence[Tensor], held: Sequence[Tensor] = ()) -> None:
        """Clients that start from these rows take these slots, with a fresh optimiser.

        In place: a captured step goes on using these very tensors.
        """
        with torch.no_grad():
            if len(slots) == self.size and all(start is starts[0] for start in starts):
                self.flat.copy_(starts[0])
                self.losses.zero_()
            else:
                torch._foreach_copy_([self._rows[slot] for slot in slots], list(starts))
                torch._foreach_zero_([self._losses[slot] for slot in slots])
            if self.layouts.held.names and held:
                torch._foreach_copy_([self.held[slot] for slot in slots], list(held))
        self._reset_optimizer(slots)

    def enter_phase(self, slots: Sequence[int], trained: Collection[str]) -> None:
        """The clients in these slots go on where they are; from now on these names train, and no others."""
        assert self.columns is not None
        trains = [float(parameter_of(name) in trained) for name in self.layout.names]
        spans = zip(trains, self.layout.spans, strict=True)
        row = torch.cat([torch.full((span,), value) for value, span in spans]).to(self.flat)
        for slot in slots:
            self.columns[slot].copy_(row)
        self._reset_optimizer(slots)

    def _reset_optimizer(self, slots: Sequence[int]) -> None:
        """A fresh optimiser."""
        states = [self.optimizer.state[self._rows[slot]] for slot in slots]
        kept = [v for state in states for v in state.values() if isinstance(v, Tensor)]
        if kept:
            with torch.no_grad():
                torch._foreach_zero_(kept)

    def finish(
        self, turns: Sequence[Turn], schedule: Schedule, enter: Callable[[Sequence[Turn]], None]
    ) -> tuple[Tensor, Tensor]:
        """Go on until these turns, the next by their end, are over: a row for each client, (clients, width),
        and the mean of its losses, (clients,). `enter` admits those whose turn begins."""
        values = torch.empty(len(turns), self.layout.width, dtype=self.flat.dtype, device=self.flat.device)
        losses = torch.empty(len(turns), dtype=torch.float64, device=self.flat.device)
        filled = 0
        for end, group in groupby(turns, key=lambda turn: turn.end):
            while self._done < end:
                if self._done in schedule.entering:
                    enter(schedule.entering[self._done])
                for phase, slots in schedule.phases.get(self._done, {}).items():
                    self.enter_phase(slots, phase)
                self.run(schedule.index[self._done], schedule.mask[self._done])
                self._done += 1
            # Copied before anyone else enters; what later steps do to an idle slot is thrown away.
            slots = [turn.slot for turn in group]
            room = slice(filled, filled + len(slots))
            with torch.no_grad():
                if len(slots) == self.size:  # all of them, by their numbers
                    values[room].copy_(self.flat)
                    losses[room].copy_(self.losses)
                else:
                    torch._foreach_copy_(list(values[room].unbind()), [self._rows[slot] for slot in slots])
                    torch._foreach_copy_(list(losses[room].unbind()), [self._losses[slot] for slot in slots])
            filled += len(slots)
        return values, losses / self._counts(turns)

    def _counts(self, turns: Sequence[Turn]) -> Tensor:
        """How many steps each took: on the device, sent without waiting for it."""
        counts = torch.tensor([turn.end - turn.begin for turn in turns], dtype=torch.float64)
        return sent(counts, self.flat.device)

    def run(self, index: Tensor, mask: Tensor) -> None:
        """One step on rows `index`, (clients, batch), of which `mask` says which are real."""
        if self.mode == "eager" or not self.on_gpu:
            self._eager(index, mask)
        elif self._graph is None:
            self._capture(index, mask)
        else:
            self._index.copy_(index)
            self._mask.copy_(mask)
            self._graph.replay()

    def _eager(self, index: Tensor, mask: Tensor) -> None:
        if self._gradient is None:
            self._gradient = self._make_gradient(index, mask)
        loss, gradient = self._gradient(self.flat, *self._fixed(), index, mask)
        self.losses += loss.double() * (mask.sum(dim=1) > 0)
        if self._wide:
            self._descend(*gradient)
        else:
            self._optimise(gradient)

    @torch.no_grad()
    def _descend(self, slopes: Slopes, factors: Mapping[str, Factors]) -> None:
        """rows −= rate · slopes, of each part; where there are factors, by these."""
        parts = self.layout.views(self.flat)
        rates = self._rates.repeat_interleave(self.size // self.runs)
        for name, slope in slopes.items():
            each = rates.view(-1, *(1 for _ in slope.shape[1:]))
            parts[name].addcmul_(slope, each, value=-1)
        for name, both in factors.items():
            descend(parts[name], both, self._rates)

    def _optimise(self, gradient: Tensor) -> None:
        # A captured step writes the same memory at every replay, which stays alive here.
        for row, slope in zip(self._rows, gradient.unbind(), strict=True):
            row.grad = slope
        if self.columns is not None:
            gradient.mul_(self.columns)
        clip = self.resident.config.client.clip
        if clip is not None:  # as torch.nn.utils.clip_grad_norm_ does, for each client on its own
            for part in gradient.split(self._parts, dim=1):
                norm = torch.linalg.vector_norm(part, dim=1, keepdim=True)
                part.mul_((clip / (norm + 1e-6)).clamp(max=1.0))
        shares = self._shares
        if self.columns is not None:
            shares = self.columns if shares is None else self.columns * shares
        before = None if shares is None else self.flat.clone()
        self.optimizer.step()
        if before is not None and shares is not None:
            # A step of k times the rate is k times the step, for SGD and AdamW alike; 0 times it is none.
            self.flat.copy_(before.lerp(self.flat, shares))

    def _capture(self, index: Tensor, mask: Tensor) -> None:
        """Record the step, then undo what recording did and take the first real one."""
        self._index, self._mask = index.clone(), mask.clone()
        start = self.flat.clone()
        drawn = torch.cuda.get_rng_state(self.flat.device)
        try:
            self._record()
        except Exception as error:
            if self.mode == "captured":
                raise
            self._do_without(error)  # it may be what was compiled, which nothing depends on
            self.admit(range(self.size), start.unbind())
            self._record()
        self.admit(range(self.size), start.unbind())
        # What dropout draws must not depend on whether a round is the first of its process.
        torch.cuda.set_rng_state(drawn, self.flat.device)
        assert self._graph is not None
        self._graph.replay()

    def _record(self) -> None:
        with _recording:
            self._record_alone()

    def _record_alone(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP_STEPS):
                self._eager(self._index, self._mask)
        torch.cuda.current_stream().wait_stream(side)
        missed = self.resident.blocks.missed
        step = partial(self._eager, self._index, self._mask)
        self._graph = recorded(step, alone=self.resident.alone)
        if missed := self.resident.blocks.missed - missed:
            log.warning("%s of the recorded step could not use what was compiled.", counted(missed, "block"))

    # From the clients' pure loss to one function of tensors ---------------------------------------------

    def _fixed(self) -> list[Tensor]:
        """What a step reads and never writes: the resident parameters, then labels and inputs."""
        table = self.resident.train_table
        parameters = {name: value.detach() for name, value in self.resident.parameters.items()}
        return [
            *(parameters | self.models).values(),
            table.labels,
            *table.inputs.values(),
            self.class_weights,
            self.held,
            self.from_order,
        ]

    def _make_gradient(self, index: Tensor, mask: Tensor) -> Gradient:
        names, keys = list(self.resident.parameters), list(self.resident.train_table.inputs)
        plain, augmented = self._method.is_plain(), self.resident.augments

        def cohort(
            model: Parameters, from_order: Tensor, columns: Inputs, labels: Tensor, *rows: Any
        ) -> Tensor:
            """(clients,) the losses of one run's clients."""

            common = self._rounded - {*self.layouts.names, *map(parameter_of, self.layouts.held.names)}
            frozen = {name: model[name].bfloat16() for name in common}

            def one(
                row: Tensor, parts: Parameters, weights: Tensor, held: Tensor, index: Tensor, mask: Tensor
            ) -> Tensor:
                examples = taken(columns, labels, index, augmented=augmented)
                batch = Batch(*examples, weights, mask)
                own_model = {**model, **self.layouts.untrained(held)}
                if plain:
                    task = mapped_task(self.resident, {**own_model, **frozen})
                    return self._method.loss(parameters_in(parts), batch, task, NO_START)
                # An algorithm computes with arrays as they are; the model is given those rounded already.
                parameters = parameters_in(self.layout.views(row))
                task = mapped_task(self.resident, own_model, {**frozen, **parts}, parameters)
                start = self.layouts.start(own_model, row, held, from_order)
                return self._method.loss(parameters, batch, task, start)

            return vmap(one, randomness="different")(*rows)

        def losses_of(flat: Tensor, parts: Parameters, given: Sequence[Tensor]) -> Tensor:
            """(clients,) of their rows, and the parts of these."""
            model = dict(zip(names, given, strict=False))
            labels, columns = given[len(names)], dict(zip(keys, given[len(names) + 1 :], strict=False))
            class_weights, held, from_order, index, mask = given[-5:]
            rows = (flat, parts, class_weights, held, index, mask)
            if self.runs == 1:
                return cohort(model, from_order[0], columns, labels, *rows)
            lead = (self.runs, self.size // self.runs)
            by_run = [tree_map(lambda part: part.unflatten(0, lead), part) for part in rows]
            axes = {name: 0 if name in self.models else None for name in model}
            over_runs = vmap(
                cohort, in_dims=(axes, 0, None, None, *(0 for _ in rows)), randomness="different"
            )
            return over_runs(model, from_order, columns, labels, *by_run).flatten()

        def gradient(flat: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
            flat = flat.detach().requires_grad_(True)
            parts: Parameters = {}
            room = Room(rounded_only=not plain)
            if plain or self._rounded:
                traced = self.mode == "compiled"
                parts = parts_of(flat, self.layout, self._rounded, traced=traced, room=room)
            if not plain:
                parts = {name: part for name, part in parts.items() if name in self._rounded}
            with offered(room):
                losses = losses_of(flat, parts, given)
            (slope,) = torch.autograd.grad(losses.sum(), flat)
            return losses.detach(), slope

        def by_parts(flat: Tensor, *given: Tensor) -> tuple[Tensor, tuple[Slopes, Mapping[str, Factors]]]:
            parts = {name: part.detach().requires_grad_() for name, part in self.layout.views(flat).items()}
            thin = Thin(parts)
            with thin_products(thin):
                losses = losses_of(flat, parts, given)
            slopes = torch.autograd.grad(losses.sum(), list(parts.values()), allow_unused=True)
            found = {name: slope for name, slope in zip(parts, slopes, strict=True) if slope is not None}
            return losses.detach(), (found, thin.factors)

        way: Gradient = gradient
        if self._wide:
            with torch.random.fork_rng([self.flat.device] if self.on_gpu else []):  # a try, and no step
                _, (_, factors) = self._in_ways(by_parts, self.flat, *self._fixed(), index, mask)
            self._wide = list(factors)
            way = by_parts if factors else gradient
        if self.mode in ("compiled", "blocks"):
            return self._compiled(way, index, mask)
        return partial(self._in_ways, way)

    def _in_ways(self, gradient: Gradient, *given: Tensor) -> tuple[Tensor, Any]:
        with self._ways():
            return gradient(*given)

    @contextmanager
    def _ways(self) -> Iterator[None]:
        """Within it the model computes in ways that a vmap over clients is quick with."""
        module = self.resident.model
        blocks = self.blocks.used() if self.blocks is not None else nullcontext()
        views = self.on_gpu and self.mode != "compiled"
        if views not in self._products:  # looked for once: a small model's step is not much longer
            self._products[views] = product_ways(module, self.layouts.names, views=views)
        products = with_forwards(self._products[views])
        own = partial(self.resident.own_weights.used, self.layouts.names)
        ways = {"captured": own, "compiled": partial(own, traced=True)}
        kernels = ways.get(self.mode, nullcontext)()
        wide = own_products(module, self._wide)
        with folded(module), products, wide, kernels, blocks, torch.enable_grad():
            yield

    def _compiled(self, gradient: Gradient, index: Tensor, mask: Tensor) -> Gradient:
        """The same function compiled, or its blocks.

        A compiler can fail in any way, and nothing depends on it: then the step stays as it is.
        """
        given = (self.flat, *self._fixed(), index, mask)
        keep_what_is_compiled(self.resident.device)
        blocks = self.resident.blocks
        try:
            if self.mode == "blocks":
                self.blocks = blocks
                with self._ways():
                    blocks.compile_for(lambda: gradient(*given))
                return partial(self._in_ways, gradient)
            with self._ways():
                traced = make_fx(gradient)(*given)
            compiled = compiled_by_torch(traced)
            compiled(*given)
            return compiled
        except Exception as error:  # noqa: BLE001  (see above)
            self._do_without(error)
            return partial(self._in_ways, gradient)

    def _do_without(self, error: Exception) -> None:
        """Without what is compiled, from now on."""
        self.blocks, self.mode, self._gradient = None, "captured", None
        self.resident.compiling.failed()
        log.warning("The step could not be compiled, and goes on without: %s", told(error))


def mapped_task(
    resident: "Resident", model: Parameters, rounded: Parameters = NOTHING, of: Parameters = NOTHING
) -> Task:
    """The task for parameters that are mapped over; those that it is not given are of `model`.

    `rounded` stand for the arrays of `model` and `of`, where the model is called with these very ones. What
    an algorithm made of arrays (a mixture) is rounded here, or its products would be in float32.
    """
    exact = {**model, **of}

    def call(parameters: Parameters, inputs: Inputs) -> Tensor:
        whole = {**model, **parameters}
        whole |= {name: part for name, part in rounded.items() if whole[name] is exact[name]}
        whole |= {name: whole[name].bfloat16() for name in resident.rounded}
        ready = with_ready_mask(inputs, resident.model)
        return called(resident.model, whole, ready)

    return resident.task.with_call(call)


@torch.no_grad()
def rows_say(
    resident: "Resident", layouts: Layouts, values: Tensor, held: Tensor, rows: Sequence[Tensor]
) -> list[Tensor]:
    """What the model of each of these clients says of rows of its own, on the host."""
    module, table = resident.model, resident.train_table
    model = {name: value.detach() for name, value in resident.parameters.items()}
    longest = max(len(own) for own in rows)
    index = torch.stack([pad(own, (0, longest - len(own))) for own in rows]).to(resident.device)

    def one(row: Tensor, held: Tensor, index: Tensor) -> Tensor:
        task = mapped_task(resident, {**model, **layouts.untrained(held)})
        batch = Batch(*taken(table.inputs, table.labels, index, augmented=False))
        return task.said(task.logits(parameters_in(layouts.trained.views(row)), batch))

    with judging(module), folded(module), as_products(module, layouts.names):
        pieces = index.split(max(1, resident.task.rows_at_once(table) // len(rows)), dim=1)
        said = torch.cat([vmap(one)(values, held, piece) for piece in pieces], dim=1).cpu()
    return [said[number, : len(own)] for number, own in enumerate(rows)]


@torch.no_grad()
def look_rows(
    resident: "Resident",
    layouts: Layouts,
    model: Parameters,
    from_order: Tensor,
    order: Order,
    values: Tensor,
    held: Tensor,
    weights: Tensor,
    index: Tensor,
    mask: Tensor,
) -> list[dict[str, Tensor]]:
    """What the algorithm makes of these clients' first batches: for each, arrays by `namespace/name`."""
    module = resident.model
    method, rate = order.method, learning_rate(resident.config.client, order.round, resident)

    def loss(
        shift: Tensor, row: Tensor, held: Tensor, weights: Tensor, index: Tensor, mask: Tensor
    ) -> Tensor:
        task = mapped_task(resident, {**model, **layouts.untrained(held)})
        batch = Batch(*resident.take(index), weights, mask)
        return method.seen(shift, batch, task, layouts.start(model, row, held, from_order))

    def look(slope: Tensor, row: Tensor, held: Tensor) -> dict[str, Tensor]:
        return flattened(method.look(slope, layouts.start(model, row, held, from_order), rate))

    with judging(module), folded(module), as_products(module, layouts.names), torch.enable_grad():
        # Around the vmap, as a step's slopes are: the folded way has none within.
        shifts = values.new_zeros(len(values), requires_grad=True)
        losses = vmap(loss)(shifts, values, held, weights, index, mask)
        (slopes,) = torch.autograd.grad(losses.sum(), shifts)
    found = vmap(look)(slopes, values, held)
    return [{name: value[number] for name, value in found.items()} for number in range(len(values))]


@torch.no_grad()
def finish_rows(
    layouts: Layouts,
    model: Parameters,
    from_order: Tensor,
    order: Order,
    values: Tensor,
    held: Tensor,
    steps: Tensor,
    rate: float,
) -> Finished:
    """What the algorithm makes of these clients' rows: a row for each of them in every array."""

    def one(row: Tensor, held: Tensor, steps: Tensor) -> tuple[Any, ...]:
        start = layouts.start(model, row, held, from_order)
        done = order.method.finish(start, parameters_in(layouts.trained.views(row)), steps, rate)
        return dict(done.own), dict(done.reply), dict(done.model), dict(done.figures)

    return Finished(*vmap(one)(values, held, steps))
