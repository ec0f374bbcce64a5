"""Σ gᵢ · min(1, C/‖gᵢ‖) over each client's own sample, for stacked private clients.

Per-example gradients are many small GPU kernels, which take Python longer to launch than a GPU to compute. So
a step that repeats, with the same number of clients and the same sample lengths, is captured as a CUDA graph
and replayed. Both numbers are padded a little, so that few graphs suffice.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.core.seeds import generators_of
from fedfrozen_app.exchange.block import Layout
from fedfrozen_app.local.layouts import NO_START
from fedfrozen_app.local.private_training import example_gradients
from fedfrozen_app.local.recording import recorded
from fedfrozen_app.privacy.dpsgd import exact_products, norms_of
from fedfrozen_app.privacy.example_gradients import ExampleGradients, Packed
from fedfrozen_app.vmap.devices import sent
from fedfrozen_app.vmap.load_gpu_kernels import gpu_kernels_on

if TYPE_CHECKING:
    from fedfrozen_app.local.private_training import Training
    from fedfrozen_app.local.worker import Worker

log = logging.getLogger(__name__)
LENGTH = 8  # samples on a GPU are padded to a multiple of this
OFTEN = 2  # steps of a shape before it is recorded (a recording costs about ten steps); at least 1
GRAPHS = 12  # recordings of one kind of step
KEPT = 4  # kinds of steps whose memory and recordings are kept
# Devices on which gradients that are not finite are always masked, for arrays up to this size: otherwise a
# check for them is cheaper. On a GPU Python would wait for that check, and the GPU then for Python; for two
# layers of MiniLM, 3.5 million numbers, that is still quicker than to write all gradients once more.
CAREFUL_ON, CAREFUL_MOST = ("cuda",), 1 << 20

Shape = tuple[int, int, int]  # clients, rows of each, and rows of all if samples are not padded
# Packed samples: the position of each client's rows among all rows, -1 for none; and the rows.
Piece = tuple[Tensor, Shape]
Settle = Callable[[], None]


@dataclass
class KeptSums:
    """A worker's sums, which keep their memory and recordings between rounds."""

    by_kind: "dict[Any, ClippedSums]" = field(default_factory=dict)
    pool: Any = None  # the memory pool of all recorded steps, which never run concurrently
    may_record: bool = True  # until a recording has failed


@dataclass(frozen=True)
class _StepSums:
    """The sums of one step."""

    sums: Tensor  # (clients, width)
    losses: Tensor  # (clients,)
    broken: Tensor  # whether a gradient is not finite

    def clear(self) -> None:
        for value in (self.sums, self.losses, self.broken):
            value.zero_()


@dataclass
class _Recordings:
    """CUDA graphs of one kind of step, by the shape of its samples."""

    worker: "Worker"
    wanted: bool
    seen: Counter[Shape] = field(default_factory=Counter)
    inputs: dict[Shape, Tensor] = field(default_factory=dict)  # what a recorded step reads
    graphs: dict[Shape, torch.cuda.CUDAGraph] = field(default_factory=dict)

    @property
    def allowed(self) -> bool:
        return self.wanted and self.worker.kept.for_worker(KeptSums).may_record

    def is_due(self, shape: Shape) -> bool:
        room = len(self.graphs) < GRAPHS and shape not in self.graphs
        return self.allowed and room and self.seen[shape] > OFTEN

    def record(self, numbers: Tensor, shape: Shape, step: Callable[[Tensor, Shape], None]) -> None:
        worker, kept = self.worker, self.worker.kept.for_worker(KeptSums)
        self.inputs[shape] = numbers.clone()
        drawn = torch.cuda.get_rng_state(worker.device)
        work = partial(step, self.inputs[shape], shape)
        if kept.pool is None:
            kept.pool = torch.cuda.graph_pool_handle()
        try:
            self.graphs[shape] = recorded(work, alone=False, pool=kept.pool)
        except RuntimeError as error:  # such as a model that reads values on the host: then run eagerly
            self._give_up(error)
        finally:
            torch.cuda.set_rng_state(drawn, worker.device)

    def _give_up(self, error: RuntimeError) -> None:
        worker, kept = self.worker, self.worker.kept.for_worker(KeptSums)
        # torch remains in capture mode, and would keep all memory that other streams have used.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(worker.device.index or 0, kept.pool)
        kept.pool, kept.may_record = None, False
        log.info("Private steps are not recorded: %s", (str(error).splitlines() or [""])[0])

    def replay(self, numbers: Tensor, shape: Shape) -> None:
        self.inputs[shape].copy_(numbers)
        self.graphs[shape].replay()


class ClippedSums:
    """Clipped sums of at most `size` clients, whose trained arrays are `rows`. A step writes `sums` and
    `losses`: `take` begins it, and the function that it returns ends it. All memory that a recorded step
    reads and writes is allocated here, once.
    """

    def __init__(
        self,
        worker: "Worker",
        gradients: ExampleGradients,
        names: Sequence[str],
        size: int,
        clip: float,
        *,
        records: bool,
    ) -> None:
        self._worker, self._gradients, self._clip = worker, gradients, clip
        self.layout = Layout.of({name: worker.parameters[name] for name in names})
        self.columns = _columns(self.layout, worker.device)
        self.rows = torch.zeros(size, self.layout.width, dtype=worker.task.dtype, device=worker.device)
        self.losses = torch.zeros(size, dtype=torch.float64, device=worker.device)  # summed over steps
        broken = torch.zeros((), dtype=torch.bool, device=worker.device)
        self._step = _StepSums(torch.zeros_like(self.rows), torch.zeros_like(self.losses), broken)
        self._nothing = torch.zeros((), dtype=worker.task.dtype, device=worker.device)
        # Where there are GPU kernels for it, examples with weight 0 are left out at no cost.
        exact = worker.task.dtype == torch.float32
        self._kernels = gpu_kernels_on(self.rows.device, "privacy.gpu_kernels") if exact else None
        small = worker.device.type in CAREFUL_ON and self.layout.width <= CAREFUL_MOST
        self._is_careful = small or self._kernels is not None
        self._recordings = _Recordings(worker, records)

    @property
    def sums(self) -> Tensor:
        """(clients, width) of the last step."""
        return self._step.sums

    @property
    def is_recorded(self) -> bool:
        return bool(self._recordings.graphs)

    def begin(self) -> None:
        """Start every client from the loaded model."""
        parameters = self._worker.parameters
        self.rows.copy_(self.layout.flatten({name: parameters[name] for name in self.layout.names}))
        self.losses.zero_()

    def laid_out(self, drawn: Sequence[Tensor], at_once: int) -> list[Piece]:
        """Samples as pieces, (clients, rows), with at most `at_once` rows of each client."""
        device = self._worker.device
        on_gpu, packs = device.type == "cuda", self._gradients.has_backbone
        count, width = padded(len(drawn), max(len(index) for index in drawn), len(self.rows), on_gpu)
        pieces: list[Piece] = []
        for first in range(0, width, at_once):
            own = [index[first : first + at_once].numpy() for index in drawn]
            numbers, shape = packed(own, count, min(at_once, width - first), on_gpu=on_gpu, packs=packs)
            pieces.append((sent(torch.from_numpy(numbers), device), shape))
        return pieces

    def record(self, pieces: Sequence[Piece], alone: Callable[[], None]) -> None:
        """Record the pieces whose shape has occurred often enough. `alone` waits for all other
        threads that use the device."""
        for numbers, shape in pieces:
            self._recordings.seen[shape] += 1
            if self._recordings.is_due(shape):
                alone()
                self._recordings.record(numbers, shape, partial(self._one, careful=self._is_careful))

    def take(self, pieces: Sequence[Piece]) -> Settle:
        """Begin the sums of one step. The returned function ends it, and may wait for the device."""
        generators = [] if self._is_careful else generators_of(self._worker.device)
        states = [generator.get_state() for generator in generators]
        self._step.clear()
        for numbers, shape in pieces:
            if shape in self._recordings.graphs:
                self._recordings.replay(numbers, shape)
            else:
                self._one(numbers, shape, careful=self._is_careful)

        def settle() -> None:
            if not self._is_careful and self._step.broken:  # a gradient that is not finite: repeat without it
                for generator, state in zip(generators, states, strict=True):
                    generator.set_state(state)  # the same dropout
                self._step.clear()
                for piece in pieces:
                    self._one(*piece, careful=True)
            self.losses += self._step.losses

        return settle

    def _one(self, numbers: Tensor, shape: Shape, *, careful: bool) -> None:
        """Add a piece to the step's sums and losses. A gradient that is not finite is left out if `careful`,
        and otherwise flagged: a sum that is not finite would reveal its existence."""
        table, (count, width, _) = self._worker.train_table, shape
        places, together = numbers[: count * width].view(count, width), numbers[count * width :]
        real, places = places >= 0, places.clamp(min=0)
        rows, index = self.layout.views(self.rows[:count]), together[places]
        inputs = {key: value[index] for key, value in table.inputs.items()}
        below = Packed(table.take(together), places) if self._gradients.has_backbone else None
        losses, gradients = self._gradients.of_clients(
            rows, inputs, table.labels[index], below, recorded=self._recordings.allowed
        )
        self._step.losses[:count].add_(losses.double().masked_fill(~real, 0.0).sum(dim=1))
        norms = norms_of([gradients[name] for name in rows], 2)
        finite = torch.isfinite(norms)
        if not careful:
            broken = self._step.broken
            broken |= ~finite.all()
        wanted = finite & real
        factor = (self._clip / (norms + 1e-6)).clamp(max=1.0).masked_fill(~wanted, 0.0)
        places = self._step.sums[:count].split(self.layout.spans, dim=1)
        with exact_products():
            for name, place in zip(self.layout.names, places, strict=True):
                gradient = gradients[name]
                flat = gradient.flatten(2) if gradient.dim() > 2 else gradient.unsqueeze(2)
                if self._kernels is not None:
                    self._kernels.add_weighed(place, factor, flat)
                    continue
                if careful:  # not `masked_fill`, which copies the whole array first
                    flat = torch.where(wanted[:, :, None], flat, self._nothing)
                place[:, : flat.shape[2]].add_(torch.einsum("cb,cbp->cp", factor, flat))


def padded(clients: int, longest: int, size: int, on_gpu: bool) -> tuple[int, int]:
    """The padded number of clients (at most `size`) and of rows of a step. On a GPU one of few shapes: fewer
    clients train towards the end of a round, and samples differ in length."""
    if not on_gpu:
        return clients, longest
    return min(size, 1 << (clients - 1).bit_length()), -(-longest // LENGTH) * LENGTH


def packed(
    samples: Sequence[np.ndarray], clients: int, width: int, *, on_gpu: bool, packs: bool
) -> tuple[np.ndarray, Shape]:
    """The row numbers of a piece whose samples are padded to `width`. `packs`: with only few rows of padding;
    otherwise as if all samples had that width, so that there are fewer shapes."""
    places, most = np.full((clients, width), -1, dtype=np.int64), clients * width
    for place, (end, sample) in enumerate(zip(accumulate(map(len, samples)), samples, strict=True)):
        places[place, : len(sample)] = np.arange(end - len(sample), end)
    count = sum(map(len, samples))
    room = max(1, count) if packs else most
    if on_gpu and packs:
        room = min(most, -(-room // (LENGTH * clients)) * LENGTH * clients)
    numbers = np.zeros(most + room, dtype=np.int64)
    numbers[:most], numbers[most : most + count] = places.reshape(-1), np.concatenate(samples)
    return numbers, (clients, width, room)


def _columns(layout: Layout, device: torch.device) -> Tensor | slice:
    """The columns of a row that hold values: a row may have gaps, and noise is drawn array by array."""
    starts = [0, *accumulate(layout.spans)]
    sizes = [shape.numel() for shape in layout.shapes]
    if sum(sizes[:-1]) == sum(layout.spans[:-1]):  # no gaps but at the end: a row need not be copied
        return slice(sum(sizes))
    parts = [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    return torch.cat(parts).to(device)


def sums_for(trainings: "Sequence[Training]", names: Sequence[str]) -> ClippedSums:
    """The sums for these clients; reused for the same kind of step if it does not depend on the round."""
    lead, recipe = trainings[0].client, trainings[0].recipe
    worker, method = lead.worker, lead.request.method
    make = partial(ClippedSums, names=names, size=len(trainings), clip=recipe.max_grad_norm)
    if not method.is_plain() or worker.device.type != "cuda":
        return make(worker, trainings[0].gradients(), records=False)
    key = (tuple(names), len(trainings), recipe.max_grad_norm)
    shared = worker.kept.for_worker(KeptSums)
    kept = shared.by_kind
    if key not in kept:
        gradients = example_gradients(worker, names, partial(method.loss, start=NO_START))
        kept[key] = make(worker, gradients, records=True)
    kept[key] = kept.pop(key)  # least recently used first
    while len(kept) > KEPT:
        del kept[next(iter(kept))]
    if not any(each.is_recorded for each in kept.values()):
        shared.pool = None  # a pool is freed with its last recording
    return kept[key]
