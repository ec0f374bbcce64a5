"""The cohort runner: all clients of a round trained as one.

Each client's trained parameters are a row of one matrix. One step is the clients' own pure step under `vmap`,
traced once to plain tensor operations, compiled on a GPU and replayed there as a CUDA graph. Frozen
parameters are the resident model's own: held once, whatever the cohort.

A client with fewer batches than its neighbours stops counting at its own last step: its row is copied out
then, and what later steps do to it is thrown away. Clients are sorted by their number of batches, so that
little is thrown away.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from clients import ALGORITHMS
from fedfrozen_app.exchange.block import Block, Layout
from fedfrozen_app.exchange.plan import Order, Plan
from fedfrozen_app.models.attention import folded
from fedfrozen_app.models.masks import with_ready_mask
from fedfrozen_app.models.profile import is_causal
from fedfrozen_app.models.task import Batch, Inputs, Parameters, Task
from fedfrozen_app.runtime.sequential import batches, fusion_scale, learning_rate, make_optimizer, seeded
from fedfrozen_app.seeds import seed_for

if TYPE_CHECKING:
    from fedfrozen_app.runtime.resident import Resident

log = logging.getLogger(__name__)
WARMUP_STEPS = 3  # before a capture: lazy initialisations must not be recorded
OVERHEAD = 2.0  # what launching a step costs, in clients' steps: measured with the ViT of model=vit_cifar
SPARE = 0.85  # share of the free device memory that blocks may fill


def cannot_serve(order: Order) -> str | None:
    """Why this order needs the sequential runner; None when the cohort runner can serve it."""
    if order.plan.private and order.algorithm != "fedavg":
        return "their loss looks back at private parameters"
    if set(order.plan.trained) != {*order.plan.shared, *order.plan.private}:
        return "they train something that they neither share nor keep, or keep something untrained"
    if order.selection is not None:
        return "each of them chooses its own layers"
    if order.keep < 1:
        return "each of them sends its own largest updates"
    return None


def cheapest_size(counts: Sequence[int], limit: int) -> int:
    """The block size, up to `limit`, whose blocks cost least; `counts` are the clients' batches, most first.

    A block runs as many steps as its first client has batches, and a step costs its clients plus the
    OVERHEAD of launching it. Equal clients make one block, unequal ones several with little padding.
    """

    def cost(size: int) -> float:
        return sum(counts[start] * (size + OVERHEAD) for start in range(0, len(counts), size))

    return min(range(1, limit + 1), key=lambda size: (cost(size), -size))


@dataclass(frozen=True)
class Schedule:
    """Which rows each client of a block sees in each step."""

    index: Tensor  # (steps, clients, batch) row numbers; padding repeats row 0
    mask: Tensor  # (steps, clients, batch) 1 for an example, 0 for padding
    steps: Tensor  # (clients,) how many steps are each client's own

    def padded(self, spare: int) -> "Schedule":
        """With so many more clients that have nothing to do."""
        if not spare:
            return self
        more = (0, 0, 0, spare)  # of (steps, clients, batch), at the end of the second
        index, mask = (torch.nn.functional.pad(value, more) for value in (self.index, self.mask))
        return Schedule(index, mask, torch.nn.functional.pad(self.steps, (0, spare)))


def num_batches(resident: "Resident", client: str) -> int:
    settings = resident.config.client
    epoch = -(-len(resident.rows(client).train) // settings.batch_size)
    steps = settings.local_epochs * epoch
    return steps if settings.local_steps is None else min(steps, settings.local_steps)


def lay_out(resident: "Resident", clients: Sequence[str], order: Order) -> Schedule:
    """The clients' batches, laid out on the host and sent to the device in one go."""
    settings = resident.config.client
    width = settings.batch_size
    if resident.device.type != "cuda":  # nothing is captured, so that the width is free
        width = min(width, max(len(resident.rows(client).train) for client in clients))
    counts = [num_batches(resident, client) for client in clients]
    index = torch.zeros(max(counts), len(clients), width, dtype=torch.int64)
    lengths = torch.zeros(index.shape[:2], dtype=torch.int64)  # (steps, clients)
    for number, client in enumerate(clients):
        plan = batches(resident.rows(client).train, settings, resident.config.seed, client, order.round)
        own = torch.nn.utils.rnn.pad_sequence(plan, batch_first=True)  # (own steps, longest)
        index[: len(plan), number, : own.shape[1]] = own
        lengths[: len(plan), number] = torch.tensor([len(batch) for batch in plan])
    mask = (torch.arange(width) < lengths.unsqueeze(-1)).to(resident.task.dtype)
    return Schedule(index.to(resident.device), mask.to(resident.device), torch.tensor(counts))


class CohortRunner:
    def __init__(self, resident: "Resident") -> None:
        self.resident = resident
        self._steps: dict[Any, Step] = {}
        self._block_size: int | None = None
        self._plan: Plan | None = None

    def order_of(self, clients: Sequence[str], order: Order) -> list[str]:
        """The clients as they will be trained: those with the most batches first."""
        return sorted(clients, key=lambda client: -num_batches(self.resident, client))

    def train(
        self,
        clients: Sequence[str],
        order: Order,
        base: Mapping[str, Tensor],
        private: Mapping[str, Mapping[str, Tensor]],
    ) -> Iterator[Block]:
        """Train the clients in blocks; each block's rows are its clients, as `order_of` sorts them.

        `private` holds, by client, the arrays that it keeps for itself.
        """
        resident = self.resident
        resident.load(base, order.base)
        if self._plan != order.plan:  # the freeze: the old step's memory is not needed again
            self._steps.clear()
            self._plan = order.plan
        # What travels comes first: the aggregation then sees one piece of every row.
        names = (*order.plan.shared, *order.plan.private)
        layout = Layout.of({name: resident.parameters[name] for name in names})
        for members in self._blocks(self.order_of(clients, order), order, layout):
            own = [private.get(client, {}) for client in members]
            block = self._train_block(members, order, layout, own)
            yield block.shared(order.plan.shared) if order.plan.private else block

    # Blocks ----------------------------------------------------------------------------------------------

    def _blocks(self, clients: list[str], order: Order, layout: Layout) -> list[list[str]]:
        """Blocks of one size, chosen once: a step is compiled for a size."""
        if self._block_size is None:
            limit = self._largest_block(clients, order, layout)
            counts = [num_batches(self.resident, client) for client in clients]
            self._block_size = cheapest_size(counts, limit)
            if self._block_size < len(clients):
                log.info("The cohort of %d trains in blocks of %d.", len(clients), self._block_size)
        size = self._block_size
        return [clients[start : start + size] for start in range(0, len(clients), size)]

    def _largest_block(self, clients: list[str], order: Order, layout: Layout) -> int:
        limit = min(self.resident.config.runtime.max_block or len(clients), len(clients))
        if self.resident.device.type != "cuda":
            return limit
        fits = self._measure(clients, order, layout)
        if fits < limit:
            log.info("The GPU's free memory holds %d of the %d clients at once.", fits, len(clients))
        return min(limit, fits)

    def _measure(self, clients: list[str], order: Order, layout: Layout) -> int:
        """How many clients fit: the memory that one more client takes in a real step, and what is free."""
        peaks = []
        for size in (1, 2):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step = Step(self.resident, layout, size, order, how="eager")
            schedule = lay_out(self.resident, clients[:1] * size, order)
            step.begin(order)
            step.run(schedule.index[0], schedule.mask[0])
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            del step
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        fixed, each = 2 * peaks[0] - peaks[1], max(peaks[1] - peaks[0], 1)
        return max(1, int((SPARE * free - max(fixed, 0)) // each))

    def _train_block(
        self, clients: list[str], order: Order, layout: Layout, own: list[Mapping[str, Tensor]]
    ) -> Block:
        resident = self.resident
        # The last block may be short: copies without a step of their own keep the compiled size.
        spare = max((self._block_size or 0) - len(clients), 0) if resident.device.type == "cuda" else 0
        schedule = lay_out(resident, clients, order).padded(spare)
        step = self._step(layout, len(clients) + spare, schedule.index.shape[2], order)
        base = layout.flatten({name: resident.parameters[name].detach() for name in layout.names})
        common = layout.views(base)
        starts = None
        if order.plan.private:  # (clients, width): everybody goes on from its own part
            rows = [layout.flatten(common | dict(part)) for part in own]
            starts = torch.stack(rows + [base] * spare)
        before = self._judge_base(clients, own)
        resident.model.train()
        with seeded(seed_for(resident.config.seed, "dropout", clients[0], order.round), resident.device):
            step.begin(order, starts)
            if resident.config.client.class_weights:
                for number, client in enumerate(clients):
                    step.class_weights[number] = resident.class_weights(resident.rows(client).train)
            result, losses = step.train(schedule)
        resident.model.eval()
        block = Block(
            clients=tuple(clients),
            layout=layout,
            base=base,
            values=result[: len(clients)],
            examples=[len(resident.rows(client).train) for client in clients],
        )
        block.metrics["train_loss"] = losses[: len(clients)]
        if before is not None:
            block.metrics["client_val_before"] = before
        block.metrics |= self._judge_rows(block, order, validate=before is not None)
        if before is not None or order.plan.private:  # then others were loaded to be judged
            resident.load(common, {})  # the next block starts from here
        return block

    def _step(self, layout: Layout, size: int, width: int, order: Order) -> "Step":
        settings = json.dumps(dict(order.settings), sort_keys=True)
        key = (layout.names, size, width, order.algorithm, settings)
        if key not in self._steps:
            on_gpu, compiled = self.resident.device.type == "cuda", self.resident.config.runtime.compile
            how = ("compiled" if compiled else "captured") if on_gpu else "eager"
            self._steps[key] = Step(self.resident, layout, size, order, how=how)
        return self._steps[key]

    # Judging -----------------------------------------------------------------------------------------------

    def _judge_base(self, clients: Sequence[str], own: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
        """Accuracy on each client's own validation rows as the round begins: (clients,)."""
        rows = [self.resident.rows(client).validation for client in clients]
        if not all(len(part) for part in rows):
            return None
        shares = []
        for part, private in zip(rows, own, strict=True):
            self.resident.load(private, {})
            shares.append(self.resident.evaluate_rows(part)[self.resident.task.headline])
        return torch.tensor(shares, dtype=torch.float64)

    def _judge_rows(self, block: Block, order: Order, *, validate: bool) -> dict[str, Tensor]:
        """The same for what each client has become, and what else the sequential runner would tell."""
        resident = self.resident
        personal = bool(order.plan.private)
        if not validate and not personal:
            return {}
        found: dict[str, list[float]] = {}
        for number, client in enumerate(block.clients):
            resident.load(block.slice(number), {})
            figures = resident.figures()
            if validate:
                rows = resident.rows(client).validation
                figures["client_val_after"] = resident.evaluate_rows(rows)[resident.task.headline]
            if personal and resident.judges(order.round):
                figures |= resident.judge_personal(client)
            for key, value in figures.items():
                found.setdefault(key, []).append(value)
        # A figure that only some clients have (those with test rows) stays out of a block's table.
        whole = {key: values for key, values in found.items() if len(values) == len(block.clients)}
        return {key: torch.tensor(values, dtype=torch.float64) for key, values in whole.items()}


class Step:
    """One optimiser step of a block of clients.

    `how`: "eager", or on a GPU "captured" (a CUDA graph of the same kernels) or "compiled" (traced to plain
    tensor operations and compiled first, then captured).
    """

    def __init__(self, resident: "Resident", layout: Layout, size: int, order: Order, *, how: str) -> None:
        self.resident, self.layout, self.size, self.how = resident, layout, size, how
        self.on_gpu = resident.device.type == "cuda"
        self.flat = torch.zeros(size, layout.width, dtype=resident.task.dtype, device=resident.device)
        self.flat.requires_grad_(True)
        self.losses = torch.zeros(size, dtype=torch.float64, device=resident.device)
        self._loss = self._make_loss(order)
        # (clients, classes); all ones where classes are not weighed: the mean over a batch stays the same.
        self.class_weights = torch.ones(size, len(resident.corpus.classes)).to(self.flat.detach())
        self._shares = self._fusion_shares()
        self._gradient: Callable[..., tuple[Tensor, Tensor]] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        # A graph replays what it recorded: the rate is a tensor that later rounds change in place.
        self._lr = torch.tensor(1.0, device=resident.device)
        rate: Any = self._lr if self.on_gpu else 1.0
        self.optimizer = make_optimizer(resident.config.client, [self.flat], rate, capturable=self.on_gpu)

    def _fusion_shares(self) -> Tensor | None:
        """(width,) the learning rate of each column in units of the others', where the fusion has its own."""
        scale = fusion_scale(self.resident.config.client)
        fusion = [self.resident.roles[name].kind == "fusion" for name in self.layout.names]
        if scale == 1.0 or not any(fusion):
            return None
        spans = zip(fusion, self.layout.spans, strict=True)
        return torch.cat([torch.full((span,), scale if own else 1.0) for own, span in spans]).to(
            self.flat.detach()
        )

    def begin(self, order: Order, starts: Tensor | None = None) -> None:
        """Every client starts from the round's model, or from its row of `starts`, with a fresh optimiser."""
        if starts is None:
            base = {name: self.resident.parameters[name].detach() for name in self.layout.names}
            starts = self.layout.flatten(base).expand_as(self.flat)
        self._reset(starts)
        rate = learning_rate(self.resident.config.client, order.round, self.resident)
        self._lr.fill_(rate)
        if not self.on_gpu:
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def _reset(self, values: Tensor) -> None:
        """In place: a captured step goes on using these very tensors."""
        with torch.no_grad():
            self.flat.copy_(values)
            self.losses.zero_()
            for state in self.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()

    def train(self, schedule: Schedule) -> tuple[Tensor, Tensor]:
        """Each client's row after its own last step, and the mean of its losses."""
        ends = schedule.steps.tolist()
        result = torch.empty_like(self.flat, requires_grad=False)
        for number, (index, mask) in enumerate(zip(schedule.index, schedule.mask, strict=True), start=1):
            self.run(index, mask)
            done = [client for client, end in enumerate(ends) if end == number]
            if done:  # sorted by steps: neighbours finish together
                result[done[0] : done[-1] + 1] = self.flat.detach()[done[0] : done[-1] + 1]
        return result, self.losses / self._counts(ends)

    def _counts(self, ends: list[int]) -> Tensor:
        """On the device, sent without waiting for it; a client without a step counts as having one."""
        counts = torch.tensor([max(end, 1) for end in ends], dtype=torch.float64)
        return counts.pin_memory().to(self.losses.device, non_blocking=True) if self.on_gpu else counts

    def run(self, index: Tensor, mask: Tensor) -> None:
        """One step on rows `index`, (clients, batch), of which `mask` says which are real."""
        if self.how == "eager":
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
        loss, gradient = self._gradient(self.flat.detach(), *self._fixed(), index, mask)
        # A captured step writes the same memory at every replay, which stays alive here.
        self.flat.grad = gradient
        clip = self.resident.config.client.clip
        if clip is not None:  # as torch.nn.utils.clip_grad_norm_ does, for each client on its own
            norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_((clip / (norm + 1e-6)).clamp(max=1.0))
        before = self.flat.detach().clone() if self._shares is not None else None
        self.optimizer.step()
        if before is not None and self._shares is not None:
            # A step of k times the rate is k times the step, for SGD and AdamW alike.
            self.flat.detach().copy_(before.lerp(self.flat.detach(), self._shares))
        self.losses += loss.double() * (mask.sum(dim=1) > 0)

    def _capture(self, index: Tensor, mask: Tensor) -> None:
        """Record the step, then undo what recording did and take the first real one."""
        self._index, self._mask = index.clone(), mask.clone()
        start = self.flat.detach().clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP_STEPS):
                self._eager(self._index, self._mask)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._eager(self._index, self._mask)
        self._reset(start)
        self._graph.replay()

    # From the clients' pure loss to one function of tensors ---------------------------------------------

    def _fixed(self) -> list[Tensor]:
        """What a step reads and never writes: the resident parameters, then labels and inputs."""
        table = self.resident.train_table
        own = [parameter.detach() for parameter in self.resident.parameters.values()]
        return [*own, table.labels, *table.inputs.values(), self.class_weights]

    def _make_loss(self, order: Order) -> Callable[[Parameters, Batch, Parameters, Task], Tensor]:
        algorithm = ALGORITHMS[order.algorithm]

        def loss(parameters: Parameters, batch: Batch, anchor: Parameters, task: Task) -> Tensor:
            return algorithm(parameters, batch, task=task, anchor=anchor, **order.settings)

        return loss

    def _make_gradient(self, index: Tensor, mask: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
        names, keys = list(self.resident.parameters), list(self.resident.train_table.inputs)
        trained = set(self.layout.names)
        causal = is_causal(self.resident.model)

        def gradient(flat: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
            held = dict(zip(names, given, strict=False))
            labels, columns = given[len(names)], dict(zip(keys, given[len(names) + 1 :], strict=False))
            class_weights, index, mask = given[-3:]
            anchor = {name: held[name] for name in self.layout.names}
            frozen = {name: value for name, value in held.items() if name not in trained}

            def call(parameters: Parameters, inputs: Inputs) -> Tensor:
                own = dict(parameters) | frozen
                given = with_ready_mask(inputs, causal)
                return functional_call(self.resident.model, own, args=(), kwargs=given).logits

            task = self.resident.task.with_call(call)

            def one(parameters: Parameters, weights: Tensor, index: Tensor, mask: Tensor) -> Tensor:
                inputs = {key: value[index] for key, value in columns.items()}
                return self._loss(parameters, Batch(inputs, labels[index], weights, mask), anchor, task)

            flat = flat.detach().requires_grad_(True)
            with folded(self.resident.model), torch.enable_grad():
                losses = vmap(one, randomness="different")(
                    self.layout.views(flat), class_weights, index, mask
                )
                (slope,) = torch.autograd.grad(losses.sum(), flat)
            return losses.detach(), slope

        if self.how != "compiled":
            return gradient
        traced = make_fx(gradient)(self.flat.detach(), *self._fixed(), index, mask)
        return torch.compile(traced, dynamic=False)
