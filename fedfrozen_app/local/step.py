"""One optimiser step for several clients at once, which the runners replay.

Each client's trained parameters are a row of one matrix. A step is the clients' gradients under `vmap`
(local/gradient.py), then one optimiser for all of them (local/step_optimizer.py), or the algorithm's own step
(local/own_step.py). On a GPU it is compiled or captured as a CUDA graph (local/step_graph.py).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedfrozen_app.exchange.block import Layout
from fedfrozen_app.exchange.names import parameter_of
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.client_optimizer import learning_rate
from fedfrozen_app.local.gradient import StackedGradient
from fedfrozen_app.local.layouts import Layouts
from fedfrozen_app.local.own_step import StackedOwnStep
from fedfrozen_app.local.slots import Schedule, SlotAssignment
from fedfrozen_app.local.step_arrays import StepArrays
from fedfrozen_app.local.step_graph import StepGraph
from fedfrozen_app.local.step_optimizer import StepOptimizer
from fedfrozen_app.vmap.devices import sent
from fedfrozen_app.vmap.factored_gradients import wide_layers

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


class Step:
    """One optimiser step of the clients in its slots.

    `mode`: "eager", or on a GPU "captured" (a CUDA graph of the same GPU kernels), "compiled" (traced to
    plain tensor operations and compiled first, then captured) or "blocks" (the same with the model's blocks
    alone). `runs` share it, each with as many of the slots.
    """

    def __init__(
        self,
        worker: "Worker",
        layouts: Layouts,
        size: int,
        request: TrainRequest,
        *,
        mode: str,
        runs: int = 1,
    ) -> None:
        self.worker, self.layouts, self.runs = worker, layouts, runs
        self.arrays = StepArrays.zeros(worker, layouts, size, request, runs)
        self._digests: list[dict[str, str | None]] = [{} for _ in range(runs)]  # of `arrays.models`, by run
        self._done = 0  # steps of this round
        method = request.method
        self._optimizer: StepOptimizer | StackedOwnStep
        if method.has_step():
            self._optimizer = StackedOwnStep(worker, self.arrays, layouts, method, runs)
        else:
            self._optimizer = StepOptimizer(worker, self.arrays, layouts.trained, runs)
        descends = self._optimizer.is_plain_descent(worker, method)
        wide = wide_layers(worker.model, layouts.names) if descends else []
        self._gradient = StackedGradient(
            worker, layouts, self.arrays, method, mode=mode, runs=runs, wide=wide
        )
        self._graph: StepGraph | None = None

    @property
    def layout(self) -> Layout:
        return self.layouts.trained

    @property
    def size(self) -> int:
        return self.arrays.size

    @property
    def mode(self) -> str:
        return self._gradient.mode

    @property
    def on_gpu(self) -> bool:
        return self.worker.device.type == "cuda"

    @property
    def ready(self) -> bool:
        """Whether the next step starts at once: nothing must be captured or compiled first."""
        return not self.on_gpu or self._graph is not None

    def begin(
        self,
        request: TrainRequest,
        from_server: Mapping[str, Tensor],
        run: int = 0,
        worker: "Worker | None" = None,
    ) -> None:
        """Begin a round with all slots free. `from_server`: the arrays of the train request.

        If runs share the step, `run` starts from the model that its own worker has loaded.
        """
        self._done = 0
        worker = worker or self.worker
        if self.layouts.from_server.names:
            self.arrays.from_server[run].copy_(self.layouts.from_server.flatten(from_server))
        if self.arrays.models:
            self._take_model(request, run, worker)
        config = worker.config
        self._optimizer.set_rate(run, learning_rate(config.client, request.round, config.num_rounds))

    def _take_model(self, request: TrainRequest, run: int, worker: "Worker") -> None:
        """Copy the arrays whose digests have changed: a frozen array is copied once."""
        models = self.arrays.models
        wanted = {name: request.base.get(name) for name in models}
        held = self._digests[run]
        new = [name for name, digest in wanted.items() if digest is None or held.get(name) != digest]
        if new:
            with torch.no_grad():
                torch._foreach_copy_(
                    [models[name][run] for name in new],
                    [worker.parameters[name].detach() for name in new],
                )
        self._digests[run] = wanted

    def admit(self, slots: Sequence[int], starts: Sequence[Tensor], held: Sequence[Tensor] = ()) -> None:
        """Put clients that start from these rows into these slots, with a fresh optimiser.

        In place: a captured step continues to use the same tensors.
        """
        arrays = self.arrays
        with torch.no_grad():
            if len(slots) == self.size and all(start is starts[0] for start in starts):
                arrays.rows.copy_(starts[0])
                arrays.losses.zero_()
            else:
                torch._foreach_copy_([arrays.row_list[slot] for slot in slots], list(starts))
                torch._foreach_zero_([arrays.loss_list[slot] for slot in slots])
            if self.layouts.held.names and held:
                torch._foreach_copy_([arrays.held[slot] for slot in slots], list(held))
        self._optimizer.reset(slots)

    def enter_phase(self, slots: Sequence[int], trained: Collection[str]) -> None:
        """Train only these names in these slots from now on; the clients keep their rows."""
        columns = self.arrays.columns
        assert columns is not None
        trains = [float(parameter_of(name) in trained) for name in self.layout.names]
        spans = zip(trains, self.layout.spans, strict=True)
        row = torch.cat([torch.full((span,), value) for value, span in spans]).to(self.arrays.rows)
        for slot in slots:
            columns[slot].copy_(row)
        self._optimizer.reset(slots)

    def finish(
        self,
        assignments: Sequence[SlotAssignment],
        schedule: Schedule,
        enter: Callable[[Sequence[SlotAssignment]], None],
    ) -> tuple[Tensor, Tensor]:
        """Take steps until these assignments, the next ones by their end, are finished. Returns one row per
        client, (clients, width), and its mean losses, (clients, reported losses). `enter` admits clients."""
        arrays, count, device = self.arrays, len(assignments), self.arrays.rows.device
        values = torch.empty(count, self.layout.width, dtype=arrays.rows.dtype, device=device)
        losses = torch.empty(count, *arrays.losses.shape[1:], dtype=torch.float64, device=device)
        filled = 0
        for end, group in groupby(assignments, key=lambda assignment: assignment.end):
            while self._done < end:
                if self._done in schedule.entering:
                    enter(schedule.entering[self._done])
                for phase, slots in schedule.phases.get(self._done, {}).items():
                    self.enter_phase(slots, phase)
                self.run(schedule.index[self._done], schedule.mask[self._done])
                self._done += 1
            # Copied before another client enters. Changes of an idle slot by later steps are discarded.
            slots = [assignment.slot for assignment in group]
            room = slice(filled, filled + len(slots))
            with torch.no_grad():
                if len(slots) == self.size:  # all slots, by their numbers
                    values[room].copy_(arrays.rows)
                    losses[room].copy_(arrays.losses)
                else:
                    torch._foreach_copy_(list(values[room].unbind()), [arrays.row_list[s] for s in slots])
                    torch._foreach_copy_(list(losses[room].unbind()), [arrays.loss_list[s] for s in slots])
            filled += len(slots)
        return values, losses / self._counts(assignments).unsqueeze(1)

    def _counts(self, assignments: Sequence[SlotAssignment]) -> Tensor:
        """The number of steps of each client, on the device; does not synchronise."""
        counts = torch.tensor([one.end - one.begin for one in assignments], dtype=torch.float64)
        return sent(counts, self.arrays.rows.device)

    def run(self, index: Tensor, mask: Tensor) -> None:
        """One step on rows `index`, (slots, batch), of which `mask` marks the real ones."""
        if self.mode == "eager" or not self.on_gpu:
            self._take(index, mask)
        elif self._graph is None:
            self._capture(index, mask)
        else:
            self._graph.set_batch(index, mask)
            self._graph.replay()

    def _take(self, index: Tensor, mask: Tensor) -> None:
        """The step itself: gradients, then the optimiser."""
        loss, gradient = self._gradient(index, mask)
        losses = self.arrays.losses
        losses += loss.double() * (mask.sum(dim=1) > 0).unsqueeze(1)
        if self._gradient.wide:
            self._optimizer.apply_factored(*gradient)
        else:
            self._optimizer.apply_gradients(gradient)

    def _capture(self, index: Tensor, mask: Tensor) -> None:
        """Capture the step, then undo the effects of capturing and take the first real step."""
        rows, graph = self.arrays.rows, StepGraph(index, mask)
        start = rows.clone()
        drawn = torch.cuda.get_rng_state(rows.device)
        try:
            graph.record(self.worker, self._take)
        except Exception as error:
            if self.mode == "captured":
                raise
            self._gradient.do_without_compiling(error)  # perhaps due to the compiled code, which is optional
            self.admit(range(self.size), start.unbind())
            graph.record(self.worker, self._take)
        self.admit(range(self.size), start.unbind())
        # Dropout's draws must not depend on whether a round is the first of its process.
        torch.cuda.set_rng_state(drawn, rows.device)
        self._graph = graph
        graph.replay()
