"""The noise of private steps. With a GPU, threads draw it while earlier steps are computed: a cipher on the
host generates 32 bytes per number, which takes as long as the gradients.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fedfrozen_app.privacy.noise import Noise

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

EARLY_ON = ("cuda",)  # devices for which noise is drawn while gradients are computed
AHEAD = 2  # draws kept ready beyond the next one; each occupies GPU memory

Drawn = Callable[[], Tensor | None]  # (clients, numbers); None without noise
Job = Future[tuple[Tensor, torch.cuda.Event | None]]


class Draws(Protocol):
    """The noise of a block's steps, requested in their order."""

    def coming(self, step: int) -> Drawn:
        """The noise of this step, whose samples have been drawn."""

    def pause(self) -> None:
        """Wait until no thread is drawing."""


class _WhenAsked:
    def __init__(self, draw: Callable[[int], Tensor | None]) -> None:
        self._draw = draw

    def coming(self, step: int) -> Drawn:
        return partial(self._draw, step)

    def pause(self) -> None:
        """Draws noise only when it is needed."""


class Threads:
    """Threads that draw noise in the order of the steps, and keep unused draws for the next round."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._count = device, os.cpu_count() or 1
        self._ciphers = ThreadPoolExecutor(self._count, thread_name_prefix="cipher")
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="noise")
        self._started: deque[tuple[torch.Size, Job]] = deque()

    def begin(self, sources: Sequence[Noise], like: Tensor) -> None:
        work = partial(type(sources[0]).standards, sources, like, self._ciphers, self._count)
        self._started.append((_shape(sources, like), self._aside.submit(_drawn_aside, work, self._device)))

    def take(self) -> Job:
        return self._started.popleft()[1]

    def keep_only(self, shapes: Sequence[torch.Size]) -> int:
        """The number of started draws, if they are the first ones that this round needs. Drop all others, and
        those that failed for lack of memory."""
        started = [shape for shape, _ in self._started]
        failed = any(job.done() and job.exception() is not None for _, job in self._started)
        if failed or started != [*shapes[: len(started)]]:
            self.drop()
        return len(self._started)

    def pause(self) -> None:
        wait([job for _, job in self._started])

    def drop(self) -> None:
        for _, job in self._started:
            job.cancel()
        self.pause()
        self._started.clear()


class _Early:
    """Draws by threads. Noise that need not come in sequence from the client's own source is drawn from
    separate sources, one per draw, before samples are drawn, before steps, and before the round ends."""

    def __init__(
        self, threads: Threads, sources: Sequence[Noise], counts: Sequence[int], like: Tensor, *, again: bool
    ) -> None:
        self._threads, self._like = threads, like
        self._is_free = sources[0].another() is not None
        counts = [*counts, *counts[:AHEAD]] if again and self._is_free else counts
        self._wanted = [sources[:count] for count in counts]
        shapes = [_shape(each, like) for each in self._wanted] if self._is_free else []
        self._started = threads.keep_only(shapes)  # before the first step is requested

    def coming(self, step: int) -> Drawn:
        last = step + AHEAD if self._is_free else step
        for sources in self._wanted[self._started : last + 1]:
            self._threads.begin([source.another() or source for source in sources], self._like)
            self._started += 1
        return partial(_taken, self._threads.take())

    def pause(self) -> None:
        self._threads.pause()


@contextmanager
def drawing(
    worker: "Worker", sources: Sequence[Noise] | None, counts: Sequence[int], like: Tensor, *, again: bool
) -> Iterator[Draws]:
    """The noise of `len(counts)` steps, step i from the first `counts[i]` sources; no noise without sources.
    `again`: the next round will probably have as many clients and such steps again."""
    if sources is None or not counts:
        yield _WhenAsked(lambda step: None)
        return
    if worker.device.type not in EARLY_ON:
        standards = type(sources[0]).standards
        yield _WhenAsked(lambda step: standards(sources[: counts[step]], like))
        return
    threads = worker.kept.for_worker(Threads, partial(Threads, worker.device))
    try:
        yield _Early(threads, sources, counts, like, again=again)
    except BaseException:
        threads.drop()
        raise


def drop_noise(worker: "Worker") -> None:
    """Drop noise that was drawn for a round that will not take place."""
    threads = worker.kept.find(Threads)
    if threads is not None:
        threads.drop()


def _shape(sources: Sequence[Noise], like: Tensor) -> torch.Size:
    return torch.Size((len(sources), *like.shape))


def _drawn_aside(draw: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
    """Draw on a separate CUDA stream, so that draws and gradients do not wait for each other."""
    if device.type != "cuda":
        return draw(), None
    side = _side(device)
    with torch.cuda.stream(side):
        return draw(), side.record_event()


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """The stream for draws, the same in every round: torch keeps freed memory per stream. It has priority
    over gradients, because the cipher waits for the memory that its short work frees."""
    return torch.cuda.Stream(device, priority=-1)


def _taken(job: Job) -> Tensor:
    drawn, there = job.result()
    if there is not None:
        now = torch.cuda.current_stream(drawn.device)
        now.wait_event(there)
        drawn.record_stream(now)
    return drawn
