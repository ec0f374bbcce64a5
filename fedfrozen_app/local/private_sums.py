"""Σ gᵢ · min(1, C/‖gᵢ‖) over each client's own sample, for private clients side by side.

Gradients of single examples are many small kernels, which take Python longer to start than a GPU to compute.
There a step that comes again, of as many clients with samples as long, is recorded and replayed; both are
padded a little, so that few recordings serve for all.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.devices import sent
from fedfrozen_app.exchange.block import Layout
from fedfrozen_app.local.private import example_gradients
from fedfrozen_app.local.recording import recorded
from fedfrozen_app.local.step import NO_START
from fedfrozen_app.models.kernels import kernels_on
from fedfrozen_app.privacy.dpsgd import ExampleGradients, Packed, exact_products, norms_of
from fedfrozen_app.seeds import generators_of

if TYPE_CHECKING:
    from fedfrozen_app.local.private import Training
    from fedfrozen_app.local.resident import Resident

log = logging.getLogger(__name__)
LENGTH = 8  # samples on a GPU are padded to a multiple of it
OFTEN = 2  # so often a step is taken before it is recorded, which takes as long as some ten; at least once
GRAPHS = 12  # recordings of one kind of step
KEPT = 4  # kinds of steps whose memory and recordings stay
# Where gradients that are not finite are always taken out, of arrays up to so many numbers: elsewhere a look
# whether there are any costs less. On a GPU Python would wait for that look, and the GPU then for Python; for
# two layers of MiniLM, 3.5 million numbers, that is still quicker than to write all gradients once more.
CAREFUL_ON, CAREFUL_MOST = ("cuda",), 1 << 20

Shape = tuple[int, int, int]  # clients, rows of each, and of all where no sample is made longer
# Of samples: where each row of each client is among those of all, or -1 where there is none; and these.
Piece = tuple[Tensor, Shape]
Settle = Callable[[], None]


class ClippedSums:
    """For `size` clients or fewer, whose trained arrays are `rows`; a step writes `sums` and `losses`: `take`
    begins it, and what that returns ends it.

    All memory that a recorded step reads and writes is made here, once.
    """

    def __init__(
        self,
        resident: "Resident",
        gradients: ExampleGradients,
        names: Sequence[str],
        size: int,
        clip: float,
        *,
        records: bool,
    ) -> None:
        self._resident, self._gradients, self._clip = resident, gradients, clip
        self.layout = Layout.of({name: resident.parameters[name] for name in names})
        self.columns = _columns(self.layout, resident.device)
        self.rows = torch.zeros(size, self.layout.width, dtype=resident.task.dtype, device=resident.device)
        self.sums = torch.zeros_like(self.rows)
        self.losses = torch.zeros(size, dtype=torch.float64, device=resident.device)  # added up over steps
        self._step_losses = torch.zeros_like(self.losses)
        self._broken = torch.zeros((), dtype=torch.bool, device=resident.device)
        self._nothing = torch.zeros((), dtype=resident.task.dtype, device=resident.device)
        # Where there are kernels for it, whatever counts nothing is left out at no cost.
        exact = resident.task.dtype == torch.float32
        self._kernels = kernels_on(self.rows.device, "privacy.gpu_kernels") if exact else None
        small = resident.device.type in CAREFUL_ON and self.layout.width <= CAREFUL_MOST
        self._is_careful = small or self._kernels is not None
        self._records = records
        self._seen: Counter[Shape] = Counter()
        self._given: dict[Shape, Tensor] = {}  # what a recorded step reads
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    def begin(self) -> None:
        """Every client starts from the model that is loaded."""
        parameters = self._resident.parameters
        self.rows.copy_(self.layout.flatten({name: parameters[name] for name in self.layout.names}))
        self.losses.zero_()

    def laid_out(self, drawn: Sequence[Tensor], at_once: int) -> list[Piece]:
        """Samples as (clients, rows), so many rows at once."""
        device = self._resident.device
        on_gpu, packs = device.type == "cuda", self._gradients.has_trunk
        count, width = padded(len(drawn), max(len(index) for index in drawn), len(self.rows), on_gpu)
        pieces: list[Piece] = []
        for first in range(0, width, at_once):
            own = [index[first : first + at_once].numpy() for index in drawn]
            numbers, shape = packed(own, count, min(at_once, width - first), on_gpu=on_gpu, packs=packs)
            pieces.append((sent(torch.from_numpy(numbers), device), shape))
        return pieces

    def record(self, pieces: Sequence[Piece], alone: Callable[[], None]) -> None:
        """Those that have come often enough, once this thread is `alone` at the device."""
        for numbers, shape in pieces:
            self._seen[shape] += 1
            if self._is_due(shape):
                alone()
                self._record(numbers, shape)

    def _is_due(self, shape: Shape) -> bool:
        room = len(self._graphs) < GRAPHS and shape not in self._graphs
        return self._may_record and room and self._seen[shape] > OFTEN

    @property
    def _may_record(self) -> bool:
        return self._records and self._resident.records_private

    @property
    def is_recorded(self) -> bool:
        return bool(self._graphs)

    def take(self, pieces: Sequence[Piece]) -> Settle:
        """Begin the sums of one step. What is returned ends it, and may wait for the device."""
        generators = [] if self._is_careful else generators_of(self._resident.device)
        states = [generator.get_state() for generator in generators]
        self._clear()
        for numbers, shape in pieces:
            if shape in self._graphs:
                self._given[shape].copy_(numbers)
                self._graphs[shape].replay()
            else:
                self._one(numbers, shape, careful=self._is_careful)

        def settle() -> None:
            if not self._is_careful and self._broken:  # it would spoil the sums: once more, without it
                for generator, state in zip(generators, states, strict=True):
                    generator.set_state(state)  # the same dropout
                self._clear()
                for piece in pieces:
                    self._one(*piece, careful=True)
            self.losses += self._step_losses

        return settle

    def _clear(self) -> None:
        for value in (self.sums, self._step_losses, self._broken):
            value.zero_()

    def _one(self, numbers: Tensor, shape: Shape, *, careful: bool) -> None:
        """Added to the step's sums and losses. What is not finite counts nothing, where `careful`, or else is
        noted: a sum that is not would tell that it is there."""
        table, (count, width, _) = self._resident.train_table, shape
        places, together = numbers[: count * width].view(count, width), numbers[count * width :]
        real, places = places >= 0, places.clamp(min=0)
        rows, index = self.layout.views(self.rows[:count]), together[places]
        inputs = {key: value[index] for key, value in table.inputs.items()}
        below = Packed(table.take(together), places) if self._gradients.has_trunk else None
        losses, slopes = self._gradients.of_clients(
            rows, inputs, table.labels[index], below, recorded=self._may_record
        )
        self._step_losses[:count].add_(losses.double().masked_fill(~real, 0.0).sum(dim=1))
        norms = norms_of([slopes[name] for name in rows], 2)
        finite = torch.isfinite(norms)
        if not careful:
            self._broken |= ~finite.all()
        wanted = finite & real
        factor = (self._clip / (norms + 1e-6)).clamp(max=1.0).masked_fill(~wanted, 0.0)
        places = self.sums[:count].split(self.layout.spans, dim=1)
        with exact_products():
            for name, place in zip(self.layout.names, places, strict=True):
                slope = slopes[name]
                flat = slope.flatten(2) if slope.dim() > 2 else slope.unsqueeze(2)
                if self._kernels is not None:
                    self._kernels.add_weighed(place, factor, flat)
                    continue
                if careful:  # not `masked_fill`, which copies all of it first
                    flat = torch.where(wanted[:, :, None], flat, self._nothing)
                place[:, : flat.shape[2]].add_(torch.einsum("cb,cbp->cp", factor, flat))

    def _record(self, numbers: Tensor, shape: Shape) -> None:
        resident = self._resident
        self._given[shape] = numbers.clone()
        drawn = torch.cuda.get_rng_state(resident.device)
        step = partial(self._one, self._given[shape], shape, careful=self._is_careful)
        if resident.private_pool is None:  # one for all: they never run at the same time
            resident.private_pool = torch.cuda.graph_pool_handle()
        try:
            self._graphs[shape] = recorded(step, alone=False, pool=resident.private_pool)
        except RuntimeError as error:  # a model that looks at its own numbers, say: then step by step
            self._give_up(error)
        finally:
            torch.cuda.set_rng_state(drawn, resident.device)

    def _give_up(self, error: RuntimeError) -> None:
        resident = self._resident
        # torch goes on as if it recorded, and would keep all that other streams have used.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(resident.device.index or 0, resident.private_pool)
        resident.private_pool, resident.records_private = None, False
        log.info("Private steps are not recorded: %s", (str(error).splitlines() or [""])[0])


def padded(clients: int, longest: int, size: int, on_gpu: bool) -> tuple[int, int]:
    """As how many clients, of `size`, with how many rows a step is taken. On a GPU as one of few shapes:
    clients grow fewer while a round goes on, and samples differ in length."""
    if not on_gpu:
        return clients, longest
    return min(size, 1 << (clients - 1).bit_length()), -(-longest // LENGTH) * LENGTH


def packed(
    samples: Sequence[np.ndarray], clients: int, width: int, *, on_gpu: bool, packs: bool
) -> tuple[np.ndarray, Shape]:
    """The numbers of a piece, of samples up to so wide. `packs`: rows of all clients are few more than there
    are; or else as many as if all samples were as wide, so that there is one shape less to tell apart."""
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
    """Where the numbers of a row lie: it may have gaps, and noise is drawn for an array after another."""
    starts = [0, *accumulate(layout.spans)]
    sizes = [shape.numel() for shape in layout.shapes]
    if sum(sizes[:-1]) == sum(layout.spans[:-1]):  # none but at the end: a row need not be copied
        return slice(sum(sizes))
    parts = [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    return torch.cat(parts).to(device)


def sums_for(trainings: "Sequence[Training]", names: Sequence[str]) -> ClippedSums:
    """For these clients; those of the same kind of step again, where nothing of the round is in it."""
    lead, recipe = trainings[0].client, trainings[0].recipe
    resident, method = lead.resident, lead.order.method
    make = partial(ClippedSums, names=names, size=len(trainings), clip=recipe.max_grad_norm)
    if not method.is_plain() or resident.device.type != "cuda":
        return make(resident, lead.gradients(trainings[0].start), records=False)
    key = (tuple(names), len(trainings), recipe.max_grad_norm)
    kept = resident.private_sums
    if key not in kept:
        gradients = example_gradients(resident, names, partial(method.loss, start=NO_START))
        kept[key] = make(resident, gradients, records=True)
    kept[key] = kept.pop(key)  # the last used is the last to go
    while len(kept) > KEPT:
        del kept[next(iter(kept))]
    if not any(each.is_recorded for each in kept.values()):
        resident.private_pool = None  # it goes with the last that works in it
    return kept[key]
