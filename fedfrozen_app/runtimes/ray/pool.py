"""The workers of a run, as Ray actors, and the parts that they are training.

A part goes to the worker of the same number if that is free, else to any other. If a worker dies, the next
free one trains its part, and a new worker is started. Workers without room wait until a machine joins the
cluster.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError

from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.core.formatting import counted, format_error
from fedfrozen_app.runtimes.ray.actor import Place, Ready, TrainingActor
from fedfrozen_app.runtimes.ray.cluster import Room
from fedfrozen_app.runtimes.ray.packing import Packed
from fedfrozen_app.runtimes.ray.part import PartReply
from fedfrozen_app.runtimes.ray.worker_setup import RunSetup

log = logging.getLogger(__name__)
CRASHES = 3  # lost workers per part or start; more are not the machines' fault
POLL = 1.0  # seconds
GRACE = 10.0  # seconds, for workers to be placed on free resources


@dataclass(eq=False)
class Part:
    """A part of a round that is to be trained: `submit` sends it to an actor."""

    number: int
    clients: int
    submit: Callable[["Actor"], Any]
    reply: PartReply | None = None
    crashes: int = 0


@dataclass(eq=False)
class Actor:
    """One worker. `held`: digests of the arrays that it has kept from its last part."""

    number: int
    handle: Any
    placing: Any  # the reference of its placement; None once it is placed
    loading: Any  # the reference of `load`; None once model and data are loaded
    place: Place | None = None
    ready: Ready | None = None
    part: Part | None = None
    running: Any = None  # the reference of the part's reply
    held: frozenset[str] = frozenset()

    @property
    def waits_for(self) -> Any:
        return next((one for one in (self.placing, self.loading) if one is not None), self.running)


@dataclass
class ActorPool:
    setup: RunSetup
    room: Room
    data: str  # digest of the server's data, which workers must match
    patience: float  # seconds without any placed worker until an error
    actors: list[Actor] = field(default_factory=list)
    _queue: list[Part] = field(default_factory=list)
    _failed_starts: int = 0
    _last_alive: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Start all workers, and wait for those that have room now."""
        self.actors = [self._start(number) for number in range(self.setup.parts)]
        expected = min(self.room.fitting, self.setup.parts)
        self._last_alive = time.monotonic()
        began = time.monotonic()
        while not self._may_begin(expected, time.monotonic() - began):
            self._advance()

    def _may_begin(self, expected: int, waited: float) -> bool:
        """Whether all workers with room are ready; other users of the cluster may have taken resources."""
        ready = sum(one.ready is not None for one in self.actors)
        loading = sum(one.placing is None for one in self.actors) - ready
        return ready >= expected or (ready > 0 and not loading and waited > GRACE)

    def _start(self, number: int) -> Actor:
        actor = (
            ray.remote(TrainingActor)
            .options(num_cpus=self.room.cpus, num_gpus=self.room.gpus, scheduling_strategy="SPREAD")
            .remote()
        )
        return Actor(number, actor, actor.place.remote(), actor.load.remote(self.setup))

    def store(self, packed: Packed) -> Any:
        """Put arrays into Ray's object store: one copy for all workers of a machine."""
        try:
            return ray.put(packed)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise RunFailed(
                f"Ray's object store has no room for the model ({type(error).__name__}): start it with more, "
                "`ray start --object-store-memory=BYTES`, or make room on its disk, and resume."
            ) from error

    def submit(self, part: Part) -> None:
        """Train this part as soon as a worker is free."""
        self._queue.append(part)
        self._dispatch()

    def wait(self, part: Part) -> PartReply:
        while part.reply is None:
            self._advance()
        return part.reply

    def _dispatch(self) -> None:
        free = {one.number: one for one in self.actors if one.ready is not None and one.part is None}
        # First those whose own worker is free: it holds what the last round's part needed.
        for part in [part for part in self._queue if part.number in free]:
            if part.number in free:
                self._give(part, free.pop(part.number))
        for part in list(self._queue):
            if not free:
                break
            self._give(part, free.pop(min(free)))

    def _give(self, part: Part, actor: Actor) -> None:
        self._queue.remove(part)
        actor.part, actor.running = part, part.submit(actor)

    def _advance(self) -> None:
        """Wait until a worker has started, replied or died, and act on it."""
        waiting = {one.waits_for: one for one in self.actors if one.waits_for is not None}
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL)
        for reference in done:
            self._take(waiting[reference], reference)
        if any(one.placing is None for one in self.actors):
            self._last_alive = time.monotonic()
        elif time.monotonic() - self._last_alive > self.patience:
            raise RunFailed(
                f"No Ray worker has found room within {self.patience:g} s: look whether the cluster still "
                "has a machine with room for one (`ray status`), or raise runtime.node_timeout."
            )
        self._dispatch()

    def _take(self, actor: Actor, reference: Any) -> None:
        try:
            value = ray.get(reference)
        except RayTaskError as error:
            raise RunFailed(f"{self._title(actor)} failed: {format_error(_cause(error))}") from error
        except RayError as error:  # it died, or its reply was lost with its machine
            self._lost(actor, error)
            return
        if actor.placing is not None:
            actor.placing, actor.place = None, value
            return
        if actor.loading is not None:
            self._loaded(actor, value)
            return
        part = actor.part
        assert part is not None
        actor.part = actor.running = None
        if value.user_error:
            raise UserError(value.user_error)
        part.reply = value

    def _loaded(self, actor: Actor, ready: Ready) -> None:
        if ready.user_error:
            raise UserError(ready.user_error)
        if ready.data != self.data:
            raise UserError(
                f"{self._title(actor)} reads other data than the server, or splits them in another "
                "way: give every machine the same files and the same versions of all packages."
            )
        actor.loading, actor.ready = None, ready
        log.info("Worker %d of %d trains on %s.", actor.number + 1, self.setup.parts, ready.device)

    def _lost(self, actor: Actor, error: RayError) -> None:
        """Replace a lost worker, and give its part to the next free one."""
        part = actor.part
        if part is None:
            self._failed_starts += 1
            crashes = self._failed_starts
        else:
            part.crashes += 1
            crashes = part.crashes
        kind = type(error).__name__
        if crashes >= CRASHES:
            raise RunFailed(
                f"{counted(crashes, 'Ray worker')} died one after another "
                f"{'at the start' if part is None else 'with the same clients'} ({kind}): look for "
                "what ended them in Ray's logs (/tmp/ray/session_latest/logs), such as a lack of memory."
            ) from error
        again = f": the {counted(part.clients, 'client')} it had train again elsewhere" if part else ""
        log.warning("%s was lost (%s)%s.", self._title(actor), kind, again)
        ray.kill(actor.handle)
        self.actors[self.actors.index(actor)] = self._start(actor.number)
        if part is not None:
            self._queue.insert(0, part)

    def _title(self, actor: Actor) -> str:
        place = f" on {actor.place.host}" if actor.place is not None else ""
        return f"Ray worker {actor.number + 1}{place}"

    def close(self) -> None:
        """End the workers, and drop pending parts."""
        for actor in self.actors:
            ray.kill(actor.handle)
        self.actors = []
        self._queue.clear()


def _cause(error: RayTaskError) -> BaseException:
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error
