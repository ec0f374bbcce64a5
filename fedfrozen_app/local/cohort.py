"""The cohort runner: the clients of a round trained together, as many at once as pays and fits.

A client with fewer batches than its neighbours leaves its slot after its own last step, and the next client
takes it (local/slots.py); the step that all slots share is local/step.py.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedfrozen_app.exchange.block import Block, Layout
from fedfrozen_app.exchange.names import by_namespace, flattened, parameters_in, with_namespace
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.local.algorithm import ByNamespace, Finished
from fedfrozen_app.local.compiling import wished
from fedfrozen_app.local.sequential import learning_rate
from fedfrozen_app.local.slots import Schedule, Turn, batch_counts, cheapest_size, lay_out
from fedfrozen_app.local.step import START, Layouts, Step, finish_rows, loaded, look_rows, rows_say
from fedfrozen_app.models.meanwhile import training
from fedfrozen_app.models.wrapper import Wrapper
from fedfrozen_app.seeds import seed_for, seeded
from fedfrozen_app.words import counted

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident

log = logging.getLogger(__name__)
SPARE = 0.85  # share of the free device memory that the slots may fill
AHEAD_ON = ("cuda",)  # where a round is begun before its order comes
# A block with more steps is not begun so: a GPU that was given a thousand things to do makes the host wait,
# and beside so many steps the host's work between two rounds is short.
MOST_AHEAD = 256
Trained = tuple[Tensor, Tensor]  # (clients, width) what a block trained, and (clients,) the mean losses


def cannot_serve(order: Order) -> str | None:
    """Why this order needs the sequential runner; None when the cohort runner can serve it."""
    if not set(order.plan.trained) <= {*order.plan.shared, *order.plan.private}:
        return "they train something that they neither share nor keep"
    if order.choice is not None:
        return "each of them chooses its own layers"
    if order.codec is not None:
        return "each of them encodes what it sends"
    if order.masking is not None:
        return "each of them masks what it sends"
    return None


class Rows:
    """Where each client of a round starts: the common row, and what it keeps for itself."""

    def __init__(
        self,
        layouts: Layouts,
        order: Order,
        start: Tensor,
        kept: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self._layouts, self.method, self._start, self._kept = layouts, order.method, start, kept
        self.held: dict[int, Tensor] = {}  # of those who have begun and are not through
        self._nothing = start[:0]

    @cached_property
    def common(self) -> dict[str, Tensor]:
        """The parameters of the common row."""
        return parameters_in(self._layouts.trained.views(self._start))

    def begin(self, client: int) -> Tensor:
        """(width,) what it trains; what it only reads goes into `held`."""
        kept = self._kept[client]
        if not kept and not self.method.stays:
            self.held[client] = self._nothing
            return self._start
        model = {**self.common, **parameters_in(kept)}
        trained = {name: model[name] for name in self._layouts.names}
        own = flattened(self.method.start(trained, by_namespace(kept)))
        began = {with_namespace(START, name): value for name, value in model.items()}
        self.held[client] = self._layouts.held.flatten({**own, **began})
        return self._layouts.trained.flatten({**model, **own})

    def renew(self, client: int, row: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """The client's row, and what it holds, with these arrays in place of those it began with."""
        held, trained = self._layouts.held, self._layouts.trained
        self.held[client] = held.flatten({**held.views(self.held[client]), **own})
        return trained.flatten({**trained.views(row), **own})


def enter(step: Step, work: "Work", turns: Sequence[Turn], first_slot: int = 0) -> None:
    """Everybody starts from the round's model, and from its own part where it keeps one."""
    rows, resident = work.rows, work.resident
    begin = [rows.begin(turn.client) for turn in turns]
    slots = [first_slot + turn.slot for turn in turns]
    if resident.config.client.class_weights:
        for slot, turn in zip(slots, turns, strict=True):
            train = resident.rows(work.clients[turn.client]).train
            step.class_weights[slot] = resident.class_weights(train)
    if work.order.method.looks():
        first, own_slots = turns[0].begin, [turn.slot for turn in turns]
        batches = work.schedule.index[first, own_slots], work.schedule.mask[first, own_slots]
        held = torch.stack([rows.held[turn.client] for turn in turns])
        model = {**resident.parameters, **parameters_in(work.layouts.trained.views(work.start))}
        given = (resident, work.layouts, model, work.from_order, work.order)
        seen = look_rows(*given, torch.stack(begin), held, step.class_weights[slots], *batches)
        begin = [rows.renew(t.client, row, own) for t, row, own in zip(turns, begin, seen, strict=True)]
    step.admit(slots, begin, [rows.held[turn.client] for turn in turns])


def own_arrays(
    layouts: Layouts, block: Block, held: Tensor, done: Finished | None, number: int
) -> ByNamespace:
    """What one client of a block has of its own after training."""
    own = by_namespace(layouts.held.views(held[number])) | by_namespace(block.slice(number))
    renewed = {} if done is None else done.own
    return own | {space: {n: value[number] for n, value in a.items()} for space, a in renewed.items()}


def with_finished(block: Block, done: Finished) -> Block:
    """The block with what the algorithm made of its rows: some to keep, some to send."""
    reply, own = flattened(done.reply), flattened(done.own)
    layout, values, base = block.layout, block.values, block.base
    if done.model:
        views = layout.views(values)
        values = torch.stack(
            [layout.flatten({n: done.model.get(n, views[n])[i] for n in views}) for i in range(len(values))]
        )
    if reply:
        reply_layout = Layout.of({name: value[0] for name, value in reply.items()})
        sent = [reply_layout.flatten({n: value[i] for n, value in reply.items()}) for i in range(len(values))]
        values = torch.cat([values, torch.stack(sent)], dim=1)
        base = torch.cat([base, base.new_zeros(reply_layout.width)])
        layout = layout.followed_by(reply_layout)
    kept = [
        {**(block.kept[i] if block.kept else {}), **{name: value[i].clone() for name, value in own.items()}}
        for i in range(len(values))
    ]
    return replace(
        block,
        layout=layout,
        values=values,
        base=base,
        kept=kept if any(kept) else (),
        metrics={**block.metrics, **done.figures},
    )


@dataclass
class Work:
    """One run's local work of one round, ready to be trained."""

    resident: "Resident"
    clients: Sequence[str]
    order: Order
    base: Mapping[str, Tensor]  # what came with the order or is held
    layouts: Layouts
    slots: int
    schedule: Schedule
    start: Tensor  # (width,) where a client starts that keeps nothing of its own
    rows: Rows
    # By client: its figures on its validation rows as the round begins.
    before: Mapping[str, Mapping[str, float]]
    mode: str  # of the step

    def blocks(self) -> Iterator[list[Turn]]:
        """The turns, those that end first before the others, as many at a time as there are slots."""
        for first in range(0, len(self.clients), self.slots):
            yield self.schedule.turns[first : first + self.slots]

    @property
    def from_order(self) -> Tensor:
        """(width,) what came with the order beside parameters."""
        names = self.layouts.from_order.names
        return self.layouts.from_order.flatten(self.base) if names else self.start.new_zeros(0)


@dataclass
class Begun:
    """A round's work that was begun before its order came."""

    work: Work  # of the order that was expected, whose base lacks the digests that nobody knew yet
    blocks: Iterator[Block]
    versions: Sequence[int]  # of the arrays in its base, as they were read

    def serves(self, clients: Sequence[str], order: Order, base: Mapping[str, Tensor]) -> bool:
        """Whether it is what this order asks of these clients."""
        work = self.work
        if list(clients) != list(work.clients) or without_base(order) != without_base(work.order):
            return False
        if base.keys() != work.base.keys() or versions_of(work.base) != self.versions:
            return False
        # Arrays that came with the order are those that were foretold. Of others, which clients held already,
        # theirs may be another copy.
        other = [name for name, array in base.items() if array is not work.base[name]]
        other = [name for name in other if work.order.base.get(name) != order.base[name]]
        return all(same_bits(base[name], work.base[name]) for name in other)


def without_base(order: Order) -> str:
    """What an order asks for, whatever the values that it begins with."""
    return replace(order, base={}).json


def versions_of(arrays: Mapping[str, Tensor]) -> list[int]:
    """By which torch tells that an array was changed in place."""
    return [array._version for array in arrays.values()]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Zeros of both signs are equal numbers, and not the same bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(array.to(one.device).reshape(-1).view(torch.uint8) for array in (one, other)))


class CohortRunner:
    """`typical` are the clients by which the number of slots is chosen, whichever round comes first, so that
    a resumed run takes the very steps of an unbroken one. None: those of the first round that it is given."""

    def __init__(self, resident: "Resident", typical: Sequence[str] | None = None) -> None:
        self.resident = resident
        self._typical = typical
        self._steps: dict[Any, Step] = {}
        self._slots: int | None = None
        self._plan: Plan | None = None
        self._laid: tuple[Any, Layouts] | None = None  # for orders of this kind
        self._aside: torch.cuda.Stream | None = None  # on which a block trains while another is looked at
        # Before the first step asks for them.
        resident.own_weights.begin(traced=wished(resident.config) == "true")

    def through(self, clients: Sequence[str], order: Order) -> list[list[str]]:
        """The clients in the order in which they will be through, those of a block together."""
        turns, room = self._schedule(clients, order).turns, self._room(clients, order)
        ready = [clients[turn.client] for turn in turns]
        return [ready[first : first + room] for first in range(0, len(ready), room)]

    def expect(self, clients: Sequence[str], order: Order) -> None:
        """These will probably get this order: their batches are laid out now, while the device works."""
        self._schedule(clients, order)

    def _schedule(self, clients: Sequence[str], order: Order) -> Schedule:
        """The batches of this very work: laid out once, whoever asks first."""
        slots = self._room(clients, order)
        work = (tuple(clients), order.round, order.plan, slots)
        known, schedule = self.resident.laid_out or (None, None)
        if schedule is None or known != work:
            schedule = lay_out(self.resident, clients, order, slots)
            self.resident.laid_out = work, schedule
        return schedule

    def train(
        self,
        clients: Sequence[str],
        order: Order,
        base: Mapping[str, Tensor],
        kept: Mapping[str, Mapping[str, Tensor]],
    ) -> Iterator[Block]:
        """Train the clients; those that are through come in blocks, as `through` sorts them.

        `base` is what came with the order or is held; `kept`, by client, what it keeps for itself. A block
        has at most as many clients as there are slots, so that memory does not grow with the cohort.
        """
        resident = self.resident
        begun, resident.begun = resident.begun, None
        if begun is not None and begun.serves(clients, order, base):
            resident.laid_out = None  # as `prepare` does
            return begun.blocks
        del begun  # it was about something else: what it took is free
        return self.blocks_of(self.prepare(clients, order, base, kept))

    def blocks_of(self, work: Work) -> Iterator[Block]:
        ahead = self._may_run_ahead(work.order)
        yield from self._blocks(work, self._ahead(work) if ahead else self._trained(work))

    def _blocks(self, work: Work, trained: Iterator[Trained]) -> Iterator[Block]:
        for turns, (values, losses) in zip(work.blocks(), trained, strict=True):
            yield self._block(work, turns, values, losses)

    @property
    def begins_ahead(self) -> bool:
        """Whether `begin` may do anything in this run. Nobody is judged, and nothing is looked up on the
        device, as a round begins: that would wait for the device, and the round before is not closed."""
        resident, config = self.resident, self.resident.config
        waits = config.dataset.client_validation or config.client.class_weights
        return resident.device.type in AHEAD_ON and resident.alone and not waits

    def begin(self, clients: Sequence[str], order: Order, base: Mapping[str, Tensor]) -> None:
        """These will probably get this order, and these very arrays with it: their first block is begun now,
        while the host closes the round before. `order.base` has the digests that are known by now.

        Nothing is recorded, compiled or decided for it. If another order comes, it was in vain.
        """
        resident = self.resident
        resident.begun = None
        if not self.begins_ahead or not self._may_begin(clients, order):
            return
        laid_out = resident.laid_out
        versions, work = versions_of(base), self.prepare(clients, order, base, {})
        resident.laid_out = laid_out  # the order asks for it once more, when it comes
        resident.begun = Begun(work, self._blocks(work, self._ahead(work)), versions)

    def _may_begin(self, clients: Sequence[str], order: Order) -> bool:
        """Not where a method looks back at the round's model: whoever judges that meanwhile loads it once
        more, and the steps that read it are at work."""
        method, resident = order.method, self.resident
        if not method.is_plain() or method.has_arrays() or not self._may_run_ahead(order):
            return False
        if self._plan != order.plan or resident.compiling.undecided(resident):
            return False
        slots, schedule = self._room(clients, order), self._schedule(clients, order)
        kind = (order.kind, slots, schedule.index.shape[2])
        # Not one that could not be compiled, in whose place another is made.
        steps = [
            step for (*key, mode), step in self._steps.items() if tuple(key) == kind and step.mode == mode
        ]
        ready = any(step.ready for step in steps)
        return ready and schedule.turns[:slots][-1].end <= MOST_AHEAD

    def _may_run_ahead(self, order: Order) -> bool:
        """Whether a block may train while the one before is looked at: not where clients' models are loaded
        for that, and not where they keep arrays."""
        resident, method = self.resident, order.method
        keeps = method.stays or not method.adds_nothing() or self._judges_apart(order)
        return resident.device.type in AHEAD_ON and resident.alone and not keeps

    def _ahead(self, work: Work) -> Iterator[Trained]:
        """What its blocks train, always one block further than is asked for: while the server adds up a
        block, the device trains the next. The first begins at once."""
        trained = self._trained(work)
        if self.resident.device.type != "cuda":
            return chain([next(trained)], trained)
        begun = self._aside_of(trained)
        next(begun)
        return (block for block in begun if block is not None)

    def _aside_of(self, trained: Iterator[Trained]) -> Iterator[Trained | None]:
        """The same on a stream of its own: first nothing, once the first block is begun, then the blocks."""
        here = torch.cuda.current_stream(self.resident.device)
        aside = self._aside = self._aside or torch.cuda.Stream(self.resident.device)
        aside.wait_stream(here)

        def begin() -> tuple[Trained | None, torch.cuda.Event]:
            with torch.cuda.stream(aside):
                return next(trained, None), aside.record_event()

        try:
            block, over = begin()
            yield None
            while block is not None:
                following = begin()
                here.wait_event(over)
                for value in block:  # its memory is nobody else's before what is done here is over
                    value.record_stream(here)
                yield block
                block, over = following
        finally:  # what it reads is freed here
            here.wait_stream(aside)

    def prepare(
        self,
        clients: Sequence[str],
        order: Order,
        base: Mapping[str, Tensor],
        kept: Mapping[str, Mapping[str, Tensor]],
    ) -> Work:
        """Load the round's model and lay out who trains when; nothing is trained yet."""
        resident = self.resident
        resident.fold(base)
        resident.load(parameters_in(base), order.base)
        layouts, slots = self._layouts(order), self._room(clients, order)
        schedule = self._schedule(clients, order)
        resident.laid_out = None  # or it would stay in memory beside the next one
        start = loaded(resident, layouts.trained)
        own = [kept.get(client, {}) for client in clients]
        before = self._judge_base(clients, order, own)
        rows = Rows(layouts, order, start, own)
        if before and order.plan.private:  # then others were loaded to be judged
            resident.load(rows.common, {})
        steps, _, width = schedule.index.shape
        mode = resident.compiling.mode(resident, order, steps, slots * width)
        return Work(resident, clients, order, base, layouts, slots, schedule, start, rows, before, mode)

    def _trained(self, work: Work) -> Iterator[Trained]:
        """For each of the work's blocks: (clients, width) what was trained, and (clients,) mean losses."""
        resident, order, schedule = self.resident, work.order, work.schedule
        if self._plan != order.plan:  # the freeze: the old step's memory is not needed again
            self._steps.clear()
            self._plan = order.plan
        step = self._step(work, schedule.index.shape[2])
        step.begin(order, work.base)
        for turns in work.blocks():
            first = work.clients[turns[0].client]
            seed = seed_for(resident.config.seed, "dropout", first, order.round)
            with training(resident.model), seeded(seed, resident.device):
                trained = step.finish(turns, schedule, partial(enter, step, work))
            yield trained

    def _block(self, work: Work, turns: Sequence[Turn], values: Tensor, losses: Tensor) -> Block:
        resident, order = self.resident, work.order
        members = [work.clients[turn.client] for turn in turns]
        examples = [resident.rows(client).train.numel() for client in members]
        metrics = {"train_loss": losses}
        block = Block(tuple(members), work.layouts.trained, work.start, values, examples, metrics)
        held = torch.stack([work.rows.held.pop(turn.client) for turn in turns])
        done = self._finished(block, work, held, turns)
        if self._judges_apart(order):
            own = partial(own_arrays, work.layouts, block, held, done)
            block.extra_metrics = [
                self._judge_row(block, number, order, work.before, work.layouts.untrained(held[number]), own)
                for number in range(len(members))
            ]
            # The others go on from here.
            resident.load(parameters_in(work.layouts.trained.views(work.start)), {})
        else:
            say = partial(rows_say, resident, work.layouts, values, held)
            after = resident.judge_validations(members, "after", say)
            block.extra_metrics = [{**work.before.get(c, {}), **after.get(c, {})} for c in members]
        if len(order.plan.shared) < len(block.layout.names):
            block = block.shared(order.plan.shared)
        return block if done is None else with_finished(block, done)

    def _layouts(self, order: Order) -> Layouts:
        """What travels comes first: the aggregation then sees one piece of every row."""
        known, layouts = self._laid or (None, None)
        if layouts is None or known != order.kind:  # mostly as the round before
            trained = set(order.plan.trained)
            own = (name for name in order.plan.private if name in trained)
            layouts = Layouts.of(self.resident, order, (*order.plan.shared, *own))
            self._laid = order.kind, layouts
        return layouts

    def _finished(self, block: Block, work: Work, held: Tensor, turns: Sequence[Turn]) -> Finished | None:
        """What the algorithm makes of the block's rows; None where it makes nothing."""
        order = work.order
        if order.method.adds_nothing():
            return None
        steps = torch.tensor([turn.end - turn.begin for turn in turns]).to(block.values)
        rate = learning_rate(self.resident.config.client, order.round, self.resident)
        given = (work.layouts, self.resident.parameters, work.from_order, order)
        return finish_rows(*given, block.values, held, steps, rate)

    # Slots -----------------------------------------------------------------------------------------------

    def _room(self, clients: Sequence[str], order: Order) -> int:
        """How many slots: chosen once, because a step is compiled for a size."""
        if self._slots is None:
            known = self._typical or clients
            counts = batch_counts(self.resident, known, order.plan)
            self._slots = cheapest_size(counts, self._largest(known, order))
            if self._slots < len(known):
                log.info("The cohort of %d trains %s at a time.", len(known), counted(self._slots, "client"))
        return self._slots

    def _largest(self, clients: Sequence[str], order: Order) -> int:
        limit = min(self.resident.config.runtime.max_block or len(clients), len(clients))
        if self.resident.device.type != "cuda":
            return limit
        fits = self._fitting(clients[0], order)
        if fits < limit:
            log.info("The GPU's free memory holds %d of the %d clients at once.", fits, len(clients))
        return min(limit, fits)

    def _fitting(self, client: str, order: Order) -> int:
        return self._measure(client, order)

    def _measure(self, client: str, order: Order) -> int:
        """How many clients fit: the memory that one more client takes in a real step, and what is free."""
        peaks = []
        for size in (1, 2):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            result = self._try_step(client, order, size)
            torch.cuda.synchronize()
            # Three results: of the block that is added up, of the one that is through and of the next.
            peaks.append(torch.cuda.max_memory_allocated() - before + 3 * size * result)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        fixed, each = 2 * peaks[0] - peaks[1], max(peaks[1] - peaks[0], 1)
        return max(1, int((SPARE * free - max(fixed, 0)) // each))

    def _try_step(self, client: str, order: Order, size: int) -> int:
        """One step of so many clients, whose numbers nobody needs; the bytes that a client's result takes."""
        layouts = self._layouts(order)
        step = Step(self.resident, layouts, size, order, mode="eager")
        schedule = lay_out(self.resident, [client] * size, order, size)
        came = layouts.from_order
        step.begin(order, came.views(loaded(self.resident, came)) if came.names else {})
        start = loaded(self.resident, layouts.trained)
        step.admit(range(size), [start] * size)
        step.run(schedule.index[0], schedule.mask[0])
        return start.nbytes

    def _step(self, work: Work, width: int) -> "Step":
        order = work.order
        key = (order.kind, work.slots, width, work.mode)
        if key not in self._steps:
            # Of steps that are taken in another mode none is needed again.
            self._steps = {other: step for other, step in self._steps.items() if other[-1] == work.mode}
            self._steps[key] = Step(self.resident, work.layouts, work.slots, order, mode=work.mode)
        return self._steps[key]

    # Judging -----------------------------------------------------------------------------------------------

    def _judges_apart(self, order: Order) -> bool:
        """Whether clients are judged one by one, each with its own model loaded: where that is a personal
        one, or tells something of itself. Others are judged together."""
        return order.is_personal or type(self.resident.wrapper).figures is not Wrapper.figures

    def _judge_base(
        self, clients: Sequence[str], order: Order, own: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, dict[str, float]]:
        """For each client with validation rows: its figures on them as the round begins, with what is its
        own."""
        if not self._judges_apart(order):
            return self.resident.judge_validations(clients, "before", self.resident.said_of)
        found = {}
        for client, arrays in zip(clients, own, strict=True):
            if len(self.resident.rows(client).validation):
                self.resident.load(parameters_in(arrays), {})
                found[client] = self.resident.judge_validation(client, "before")
        return found

    def _judge_row(
        self,
        block: Block,
        number: int,
        order: Order,
        before: Mapping[str, Mapping[str, float]],
        untrained: Mapping[str, Tensor],
        own: Callable[[int], ByNamespace],
    ) -> dict[str, float]:
        """The same after training, and the other figures that the sequential runner reports."""
        resident, client, method = self.resident, block.clients[number], order.method
        personal = order.is_personal
        if client not in before and not personal:
            return {}
        trained = parameters_in(block.slice(number))
        resident.load({**untrained, **trained}, {})
        figures = resident.figures()
        if client in before:
            figures |= {**before[client], **resident.judge_validation(client, "after")}
        if personal and resident.evaluates_after(order.round):
            if method.is_personal():
                resident.load(method.personal(trained, own(number)), {})
            figures |= resident.judge_personal(client, shares_model=not order.plan.private)
        return figures
