"""Train stacked private clients: each draws its own sample, clips its own examples and adds its own noise, as
when trained alone. Only the gradients of a step are computed together.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fedfrozen_app.core.seeds import seeded
from fedfrozen_app.local import private_noise
from fedfrozen_app.local.client_coroutine import DueSteps, Trained
from fedfrozen_app.local.client_optimizer import learning_rate, make_optimizer, rate_groups
from fedfrozen_app.local.own_step import OwnStep, kept_state
from fedfrozen_app.local.private_noise import Drawn, Draws
from fedfrozen_app.local.private_sums import ClippedSums, Piece, sums_for
from fedfrozen_app.local.private_training import Training
from fedfrozen_app.privacy.dpsgd import draw_rows
from fedfrozen_app.vmap import model_modes

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

HOST_CLIENTS = 8  # clients at once without a GPU: more gain nothing
MOST_ROWS = 65_535  # of all clients at once: the limit of a GPU kernel's grid along one axis
GPU_SHARE = 0.5  # of its memory, for per-example gradients and the arrays to compute them


class BytesPerClient(dict[Any, int]):
    """Bytes per client, measured once for each set of trained names and number of rows in memory."""


def cannot_stack(worker: "Worker") -> str | None:
    """Why private clients must train one after another, as the rest of a sentence; None if they need not."""
    if worker.config.privacy.clipping == "ghost":
        return "privacy.clipping=ghost watches one client's backward pass"
    if worker.config.adapter.ranks:
        return "their adapters differ in rank"
    return None


def clients_at_once(trainings: Sequence[Training]) -> int:
    """How many clients that train the same names fit. Depends on machine and plan alone, so that a resumed
    run takes the same steps as an uninterrupted one."""
    worker, start, recipe = trainings[0].client.worker, trainings[0].start, trainings[0].recipe
    if worker.device.type != "cuda":
        return HOST_CLIENTS
    kind = (recipe.physical_batch, tuple(start.trained))
    known = worker.kept.for_worker(BytesPerClient)
    if kind not in known:
        known[kind] = _measured(trainings[0])
    room = GPU_SHARE * torch.cuda.get_device_properties(worker.device).total_memory
    return max(1, int(room // known[kind]))


def _measured(training: Training) -> int:
    """Peak bytes of one client's gradients, for as many rows as may be in memory at once."""
    worker, table = training.client.worker, training.client.worker.train_table
    rows = {name: worker.parameters[name].detach().unsqueeze(0) for name in training.start.trained}
    index = (torch.arange(training.recipe.physical_batch) % len(table)).unsqueeze(0).to(worker.device)
    inputs = {key: value[index] for key, value in table.inputs.items()}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with seeded(0, worker.device):  # restores the generators
        training.gradients().of_clients(rows, inputs, table.labels[index])
    return torch.cuda.max_memory_allocated() - before


def take_steps(due: Sequence[DueSteps]) -> list[Trained]:
    """The result of each client's steps. Clients that train the same names are stacked."""
    trainings = [cast(Training, each) for each in due]
    found: dict[int, Trained] = {}
    kinds: dict[tuple[str, ...], list[int]] = {}
    for number, training in enumerate(trainings):
        if not training.is_audited:
            kinds.setdefault(tuple(training.start.trained), []).append(number)
    for members in kinds.values():
        most = clients_at_once([trainings[number] for number in members])
        for first in range(0, len(members), most):
            block = members[first : first + most]
            again = len(block) == len(trainings)  # clients that train in between would wait for their noise
            done = together([trainings[number] for number in block], most, again=again)
            found |= dict(zip(block, done, strict=True))
    for number, training in enumerate(trainings):
        if number not in found:  # last: it changes the loaded model, from which the others start
            found[number] = training.run_alone()
    return [found[number] for number in range(len(trainings))]


def together(trainings: Sequence[Training], most: int, *, again: bool = False) -> list[Trained]:
    """Train from the loaded model, `most` clients at a time, those with the most steps first. `again`: the
    next round will probably be of this kind."""
    places = sorted(range(len(trainings)), key=lambda place: -trainings[place].recipe.steps)
    done = dict(zip(places, _longest_first([trainings[place] for place in places], most, again), strict=True))
    return [done[place] for place in range(len(trainings))]


def _longest_first(trainings: Sequence[Training], most: int, again: bool) -> list[Trained]:
    worker, recipes = trainings[0].client.worker, [training.recipe for training in trainings]
    groups = rate_groups(worker.config.client, worker.roles, trainings[0].start.trained)
    sums = sums_for(trainings, [name for _, own in groups for name in own])
    sums.begin()
    descent = _Descent(trainings, sums, groups)
    # Every call has the same launch cost on a GPU: use the memory of absent clients for longer samples.
    at_once = recipes[0].physical_batch * max(1, most // len(trainings))
    at_once = min(at_once, max(1, MOST_ROWS // len(trainings)))
    seen = [0] * len(trainings)  # examples in all samples of each client
    counts = [sum(each.steps > step for each in recipes) for step in range(recipes[0].steps)]
    with ExitStack() as stack, _noise(trainings, counts, sums, again) as draws, _looking_ahead(trainings):
        stack.enter_context(model_modes.training(worker.model))
        for training in trainings:
            stack.enter_context(training.client.source.dropout())  # the last one's is in force
        _descend(_prepared(trainings, counts, sums, draws, at_once, seen), sums, descent)
    request, losses = trainings[0].start.trained, sums.losses.tolist()
    rows = [sums.layout.views(row) for row in sums.rows.clone()]
    return [
        ({**{name: row[name] for name in request}, **kept}, loss / count if count else None)
        for row, kept, loss, count in zip(rows, descent.kept(), losses, seen, strict=True)
    ]


Step = tuple[int, list[Piece], Drawn]  # how many clients still train, on what, with which noise


def _prepared(
    trainings: Sequence[Training],
    counts: Sequence[int],
    sums: ClippedSums,
    draws: Draws,
    at_once: int,
    seen: list[int],
) -> Iterator[Step]:
    """Prepare each step in Python; adds each client's examples to `seen`."""
    for step, count in enumerate(counts):
        drawn = [_sample(training) for training in trainings[:count]]
        for place, index in enumerate(drawn):
            seen[place] += len(index)
        pieces = sums.laid_out(drawn, at_once)
        sums.record(pieces, draws.pause)
        yield count, pieces, draws.coming(step)


def _descend(steps: Iterator[Step], sums: ClippedSums, descent: "_Descent") -> None:
    """Take the steps, each prepared while a GPU still computes the previous one."""
    device = sums.rows.device
    before, now = _wait_for(device), next(steps, None)
    while now is not None:
        count, pieces, coming = now
        settle = sums.take(pieces)
        noise = coming()
        before()  # no further ahead: drawn noise occupies GPU memory
        now = next(steps, None)
        settle()
        descent.step(count, noise)
        before = _wait_for(device)


class _Descent:
    """Update the clients' rows from clipped sums: noise for all clients at once, then the optimiser."""

    def __init__(
        self, trainings: Sequence[Training], sums: ClippedSums, groups: Sequence[tuple[float, list[str]]]
    ) -> None:
        lead, recipes = trainings[0].client, [training.recipe for training in trainings]
        worker, settings = lead.worker, lead.worker.config.client
        self._sums, self._add = sums, type(lead.source).with_drawn
        self._noisy = torch.zeros_like(sums.rows)
        column = partial(torch.tensor, device=worker.device)
        stds = [[recipe.noise * recipe.max_grad_norm] for recipe in recipes]
        self._std = column(stds, dtype=torch.float64)
        self._batch = column([[recipe.batch] for recipe in recipes], dtype=sums.rows.dtype)
        spans = dict(zip(sums.layout.names, sums.layout.spans, strict=True))
        widths = [sum(spans[name] for name in own) for _, own in groups]
        # One tensor per client and learning rate: an optimiser iterates over its tensors in every step.
        self._parts = [each.unbind() for each in sums.rows.split(widths, dim=1)]
        self._gradients = [each.unbind() for each in self._noisy.split(widths, dim=1)]
        rate = learning_rate(settings, lead.request.round, worker.config.num_rounds)
        method, starts = lead.request.method, [training.started() for training in trainings]
        self._method, self._starts = method, starts
        self._own = [
            OwnStep(method, sums.layout.views(row), start, rate, start.trained)
            for row, start in zip(sums.rows, starts, strict=False)
            if method.has_step()
        ]
        self._optimizer = make_optimizer(
            settings,
            [
                {"params": part, "lr": rate * scale}
                for part, (scale, _) in zip(self._parts, groups, strict=True)
            ],
            rate,
        )

    def step(self, count: int, drawn: Tensor | None) -> None:
        """Step the first `count` clients, with the noise drawn for them if they add noise."""
        columns = self._sums.columns
        whole = self._sums.sums[:count, columns]
        if drawn is not None:
            whole = self._add(whole, drawn, self._std[:count])
        self._noisy[:count, columns] = whole / self._batch[:count]
        if self._own:
            for own, gradients in zip(self._own[:count], self._noisy, strict=False):
                own.apply(self._sums.layout.views(gradients))
            return
        for part, gradient in zip(self._parts, self._gradients, strict=True):
            for place, row in enumerate(part):
                row.grad = gradient[place] if place < count else None
        self._optimizer.step()

    def kept(self) -> list[dict[str, Tensor]]:
        """By client: the step state that it keeps."""
        return [kept_state(self._method, start) for start in self._starts]


def _wait_for(device: torch.device) -> Callable[[], None]:
    """A function that waits for all work that this thread has sent to the device so far."""
    if device.type != "cuda":
        return lambda: None
    return torch.cuda.current_stream(device).record_event().synchronize


def _noise(
    trainings: Sequence[Training], counts: Sequence[int], sums: ClippedSums, again: bool
) -> AbstractContextManager[Draws]:
    """The noise of each step, for its number of clients."""
    lead = trainings[0].client
    assert len({training.recipe.noise == 0 for training in trainings}) == 1, (
        "either all clients add noise, or none"
    )
    sources = [training.client.source for training in trainings] if trainings[0].recipe.noise else None
    again = again and lead.request.round < lead.worker.config.num_rounds
    return private_noise.drawing(lead.worker, sources, counts, sums.rows[0, sums.columns], again=again)


@contextmanager
def _looking_ahead(trainings: Sequence[Training]) -> Iterator[None]:
    """Compute the accountant's values for the next round, which takes some milliseconds, while a GPU trains.
    An error is raised when they are requested."""
    if trainings[0].client.worker.device.type not in private_noise.EARLY_ON:
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="accountant") as aside:
        for training in trainings:
            aside.submit(training.look_ahead)
        yield


def _sample(training: Training) -> Tensor:
    client = training.client
    sample = client.source.poisson(len(client.units), training.recipe.rate)
    return draw_rows(client.units, sample, client.source)
