"""Private clients side by side: each draws its own sample, clips its own examples and adds its own noise, as
it would by itself. What they share is that all gradients of a step are computed at once.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from fedfrozen_app.local.course import Due, Trained
from fedfrozen_app.local.private import Training
from fedfrozen_app.local.private_sums import ClippedSums, Piece, sums_for
from fedfrozen_app.local.sequential import learning_rate, make_optimizer, rate_groups
from fedfrozen_app.models import meanwhile
from fedfrozen_app.privacy.dpsgd import draw_rows
from fedfrozen_app.seeds import seeded

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident

HOST_CLIENTS = 8  # at once, where there is no GPU: more gain nothing there
EARLY_ON = ("cuda",)  # where noise is drawn while gradients are computed
MOST_ROWS = 65_535  # of all clients at once: a GPU numbers no more programs along an axis of its kernels
GPU_SHARE = 0.5  # of its memory, for the gradients of single examples and what they are made of


def cannot_stack(resident: "Resident") -> str | None:
    """Why private clients train one after another, as the rest of a sentence; None where they need not."""
    if resident.config.privacy.clipping == "ghost":
        return "privacy.clipping=ghost watches one client's backward pass"
    if resident.config.adapter.ranks:
        return "their adapters differ in rank"
    return None


def clients_at_once(trainings: Sequence[Training]) -> int:
    """How many fit, of clients that train the same names. It depends on machine and plan alone, so that a
    resumed run takes the very steps of an unbroken one."""
    resident, start, recipe = trainings[0].client.resident, trainings[0].start, trainings[0].recipe
    if resident.device.type != "cuda":
        return HOST_CLIENTS
    kind = (recipe.physical_batch, tuple(start.trained))
    if kind not in resident.private_bytes:
        resident.private_bytes[kind] = _measured(trainings[0])
    room = GPU_SHARE * torch.cuda.get_device_properties(resident.device).total_memory
    return max(1, int(room // resident.private_bytes[kind]))


def _measured(training: Training) -> int:
    """Bytes at the peak of one client's gradients, of as many rows as may be in memory at once."""
    resident, table = training.client.resident, training.client.resident.train_table
    rows = {name: resident.parameters[name].detach().unsqueeze(0) for name in training.start.trained}
    index = (torch.arange(training.recipe.physical_batch) % len(table)).unsqueeze(0).to(resident.device)
    inputs = {key: value[index] for key, value in table.inputs.items()}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with seeded(0, resident.device):  # what is drawn here is not missing later
        training.client.gradients(training.start).of_clients(rows, inputs, table.labels[index])
    return torch.cuda.max_memory_allocated() - before


def take_steps(due: Sequence[Due]) -> list[Trained]:
    """Of each what its steps came to. Those that train the same names take them together."""
    trainings = [cast(Training, each) for each in due]
    found: dict[int, Trained] = {}
    kinds: dict[tuple[str, ...], list[int]] = {}
    for number, training in enumerate(trainings):
        if not training.client.is_watched:
            kinds.setdefault(tuple(training.start.trained), []).append(number)
    for members in kinds.values():
        most = clients_at_once([trainings[number] for number in members])
        for first in range(0, len(members), most):
            block = members[first : first + most]
            done = together([trainings[number] for number in block], most)
            found |= dict(zip(block, done, strict=True))
    for number, training in enumerate(trainings):
        if number not in found:  # last: it trains the model that is loaded, from which the others start
            found[number] = training.by_itself()
    return [found[number] for number in range(len(trainings))]


def together(trainings: Sequence[Training], most: int) -> list[Trained]:
    """From the model that is loaded, where `most` clients fit. Whoever has most steps is laid out first."""
    places = sorted(range(len(trainings)), key=lambda place: -trainings[place].recipe.steps)
    done = dict(zip(places, _longest_first([trainings[place] for place in places], most), strict=True))
    return [done[place] for place in range(len(trainings))]


def _longest_first(trainings: Sequence[Training], most: int) -> list[Trained]:
    resident, recipes = trainings[0].client.resident, [training.recipe for training in trainings]
    groups = rate_groups(resident, trainings[0].start.trained)
    sums = sums_for(trainings, [name for _, own in groups for name in own])
    sums.begin()
    descent = _Descent(trainings, sums, groups)
    # Every call costs a GPU the same start: the room of clients that are not there goes to longer samples.
    at_once = recipes[0].physical_batch * max(1, most // len(trainings))
    at_once = min(at_once, max(1, MOST_ROWS // len(trainings)))
    seen = [0] * len(trainings)  # examples in all samples of each
    drawn_early = _early(resident, trainings, sums.rows[0, sums.columns])
    with ExitStack() as stack, drawn_early as draw, _looking_ahead(resident, trainings):
        stack.enter_context(meanwhile.training(resident.model))
        for training in trainings:
            stack.enter_context(training.client.source.dropout())  # the last one's is in force
        _descend(_prepared(trainings, sums, draw, at_once, seen), sums, descent)
    order, losses = trainings[0].start.trained, sums.losses.tolist()
    rows = [sums.layout.views(row) for row in sums.rows.clone()]
    return [
        ({name: row[name] for name in order}, loss / count if count else None)
        for row, loss, count in zip(rows, losses, seen, strict=True)
    ]


Drawn = Callable[[], Tensor | None]  # (clients, numbers); None where they add no noise
Step = tuple[int, list[Piece], Drawn]  # how many clients still train, on what, with which noise


def _prepared(
    trainings: Sequence[Training],
    sums: ClippedSums,
    draw: Callable[[int], Drawn],
    at_once: int,
    seen: list[int],
) -> Iterator[Step]:
    """Each step as far as Python prepares it; the examples of each client are added to `seen`."""
    for step in range(trainings[0].recipe.steps):
        count = sum(training.recipe.steps > step for training in trainings)  # they come first
        drawn = [_sample(training) for training in trainings[:count]]
        for place, index in enumerate(drawn):
            seen[place] += len(index)
        pieces = sums.laid_out(drawn, at_once)
        sums.record(pieces)
        yield count, pieces, draw(count)  # after their samples


def _descend(steps: Iterator[Step], sums: ClippedSums, descent: "_Descent") -> None:
    """Take them, each prepared while a GPU is still at the one before."""
    device = sums.rows.device
    before, now = _wait_for(device), next(steps, None)
    while now is not None:
        count, pieces, coming = now
        settle = sums.take(pieces)
        noise = coming()
        before()  # no further ahead: noise that is drawn takes a GPU's memory
        now = next(steps, None)
        settle()
        descent.step(count, noise)
        before = _wait_for(device)


class _Descent:
    """The way from clipped sums to the clients' next rows: noise for all at once, and an optimiser."""

    def __init__(
        self, trainings: Sequence[Training], sums: ClippedSums, groups: Sequence[tuple[float, list[str]]]
    ) -> None:
        lead, recipes = trainings[0].client, [training.recipe for training in trainings]
        resident = lead.resident
        self._sums, self._add = sums, type(lead.source).with_drawn
        self._noisy = torch.zeros_like(sums.rows)
        column = partial(torch.tensor, device=resident.device)
        stds = [[recipe.noise * recipe.max_grad_norm] for recipe in recipes]
        self._std = column(stds, dtype=torch.float64)
        self._batch = column([[recipe.batch] for recipe in recipes], dtype=sums.rows.dtype)
        spans = dict(zip(sums.layout.names, sums.layout.spans, strict=True))
        widths = [sum(spans[name] for name in own) for _, own in groups]
        # A client's arrays of one rate are one tensor: an optimiser looks at each tensor in every step.
        self._parts = [each.unbind() for each in sums.rows.split(widths, dim=1)]
        self._slopes = [each.unbind() for each in self._noisy.split(widths, dim=1)]
        rate = learning_rate(resident.config.client, lead.order.round, resident)
        self._optimizer = make_optimizer(
            resident.config.client,
            [
                {"params": part, "lr": rate * scale}
                for part, (scale, _) in zip(self._parts, groups, strict=True)
            ],
            rate,
        )

    def step(self, count: int, drawn: Tensor | None) -> None:
        """Of the first so many clients, with what was drawn for them where they add noise."""
        columns = self._sums.columns
        whole = self._sums.sums[:count, columns]
        if drawn is not None:
            whole = self._add(whole, drawn, self._std[:count])
        self._noisy[:count, columns] = whole / self._batch[:count]
        for part, slope in zip(self._parts, self._slopes, strict=True):
            for place, row in enumerate(part):
                row.grad = slope[place] if place < count else None
        self._optimizer.step()


def _wait_for(device: torch.device) -> Callable[[], None]:
    """Of all that this thread has given the device so far."""
    if device.type != "cuda":
        return lambda: None
    return torch.cuda.current_stream(device).record_event().synchronize


@contextmanager
def _early(
    resident: "Resident", trainings: Sequence[Training], like: Tensor
) -> Iterator[Callable[[int], Drawn]]:
    """A way to have the noise of the first so many clients drawn while the GPU computes gradients. Without a
    GPU it is drawn when it is asked for."""
    sources = [training.client.source for training in trainings]
    standards = type(sources[0]).standards
    assert len({training.recipe.noise == 0 for training in trainings}) == 1, "all add noise, or nobody does"
    if trainings[0].recipe.noise == 0:
        yield lambda count: lambda: None
        return
    if resident.device.type not in EARLY_ON:
        yield lambda count: lambda: standards(sources[:count], like)
        return
    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(1) as aside, ThreadPoolExecutor(threads) as workers:

        def draw(count: int) -> Drawn:
            work = partial(standards, sources[:count], like, workers, threads)
            return partial(_taken, aside.submit(_drawn_aside, work, resident.device))

        yield draw


@contextmanager
def _looking_ahead(resident: "Resident", trainings: Sequence[Training]) -> Iterator[None]:
    """What the next round will ask of an accountant, which takes it some milliseconds, is worked out while a
    GPU trains. An error shows itself when it is asked."""
    if resident.device.type not in EARLY_ON:
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="accountant") as aside:
        for training in trainings:
            aside.submit(training.look_ahead)
        yield


def _drawn_aside(draw: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
    """On a stream of its own: a draw is 32 bytes a number from the host, which need not wait for gradients
    and which no gradient need wait for."""
    if device.type != "cuda":
        return draw(), None
    side = _side(device)
    with torch.cuda.stream(side):
        return draw(), side.record_event()


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """The same in every round: torch keeps freed memory for each stream by itself. What little a GPU does
    there goes before gradients, of which it has enough: the cipher waits for room that it makes."""
    return torch.cuda.Stream(device, priority=-1)


def _taken(job: Future[tuple[Tensor, torch.cuda.Event | None]]) -> Tensor:
    drawn, there = job.result()
    if there is not None:
        now = torch.cuda.current_stream(drawn.device)
        now.wait_event(there)
        drawn.record_stream(now)
    return drawn


def _sample(training: Training) -> Tensor:
    client = training.client
    sample = client.source.poisson(len(client.units), training.recipe.rate)
    return draw_rows(client.units, sample, client.source)
