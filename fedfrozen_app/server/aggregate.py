"""The weighted mean of the clients' updates, one reply at a time.

A reply may hold arrays besides parameters, named `namespace/name` (SCAFFOLD's `dc/head.weight`). For these,
the sent values themselves are averaged: their base is zero.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from fedfrozen_app.core.deprecated import Alias
from fedfrozen_app.exchange.block import Block, Slice
from fedfrozen_app.exchange.client_metrics import TOO_LARGE
from fedfrozen_app.exchange.names import PARAMETERS, namespace_of, parameter_of
from fedfrozen_app.exchange.summed import PartialSums, SummedPart, SummedReply, Taken
from fedfrozen_app.secure.layout import Sums
from fedfrozen_app.server.norms import CHUNK, NormGate, divide, norm_of, row_norms, subtract, unsound
from fedfrozen_app.vmap.devices import sent

Drift = dict[str, dict[str, float]]  # by group: the metrics of a round's row
SOUND, NORM = "its update is sound", "norm of its update"  # the checks of a block's clients


@dataclass
class Update:
    """The result of a round's replies. A server's step may reuse the memory of these arrays."""

    model: dict[str, Tensor] = field(default_factory=dict)  # the mean update of each sent parameter
    extra: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # by namespace: means of other arrays
    metrics: dict[str, float] = field(default_factory=dict)  # of the replies, averaged by examples
    replies: int = 0  # valid ones; 0 if the round must change nothing
    population: int = 0  # all clients, sampled or not
    measured: Callable[[], Drift] = dict  # the drift; a function, because it waits for the device
    # The new values, from a rule that combines values: w + (value − w) may differ in the last bit.
    values: dict[str, Tensor] | None = None
    merged: dict[str, Tensor] | None = None  # the result of the server's step, if taken early

    figures = Alias("metrics")  # its old name, for one release

    @cached_property
    def drift(self) -> Drift:
        return self.measured()


class OpenBlock:
    """A block that is being aggregated: (clients, width) updates, and the weight of each row."""

    def __init__(self, block: Block, gate: NormGate | None, equal: Collection[str]) -> None:
        self.block = block
        self.predicted: Update | None = None  # the mean, if this block holds all replies of the round
        self._gate = gate
        names = block.layout.names
        parameters = [number for number, name in enumerate(names) if not namespace_of(name)]
        self._spaces = equal
        self._equal = [name for name in names if namespace_of(name) in equal]
        self.weights = [0.0] * len(block.clients)
        self._updates = block.values.sub_(block.base)
        parts = block.layout.views(self._updates).values()  # (clients, *shape) each
        self._norms = torch.stack([row_norms(part) for part in parts], dim=1)  # (clients, names)
        self.all = [float(count) for count in block.examples]
        weights = sent(torch.tensor(self.all, dtype=torch.float64), self._norms.device)
        # Copied to the host together with the metrics: one synchronisation with the device.
        block.look_at(SOUND, (self._norms * weights.unsqueeze(1) < TOO_LARGE).all(dim=1))
        if gate is not None:
            own = self._norms
            if len(parameters) < len(names):
                own = own[:, sent(torch.tensor(parameters), own.device)]
            block.look_at(NORM, torch.linalg.vector_norm(own, dim=1))
        # The sum of all updates, started before they are checked: usually all are valid.
        self.sum_of_all = self._sums(weights)

    def accept(self, number: int, weight: float) -> str | None:
        if not self.block.seen(SOUND)[number]:
            norms = (self._norms[number] * weight).tolist()
            return unsound(dict(zip(self.block.layout.names, norms, strict=True)))
        if self._gate and (far := self._gate.problem(self.block.seen(NORM)[number])):
            return far
        self.weights[number] = weight
        return None

    def fold(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Σ nᵢuᵢ (Σ uᵢ with equal weights) and Σ nᵢ‖uᵢ‖² by name."""
        refused = [number for number, weight in enumerate(self.weights) if not weight]
        if not refused and self.weights == self.all:
            return self.sum_of_all
        if refused:  # 0 · NaN would be NaN
            self._updates[refused] = 0
            self._norms[refused] = 0
        return self._sums(sent(torch.tensor(self.weights, dtype=torch.float64), self._updates.device))

    def _sums(self, weights: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        sums = self._sum(weights)
        if self._equal:
            unweighted = self._sum(weights > 0)
            sums |= {name: unweighted[name] for name in self._equal}
        unweighted_drift = PARAMETERS in self._spaces
        squares = (
            (weights > 0).to(weights) @ self._norms.square()
            if unweighted_drift
            else weights @ self._norms.square()
        )
        return sums, dict(zip(self.block.layout.names, squares.unbind(), strict=True))

    def _sum(self, weights: Tensor) -> dict[str, Tensor]:
        return self.block.layout.views(weights.to(self._updates.dtype) @ self._updates)


class RunningMean:
    """Σ nᵢuᵢ / Σ nᵢ with uᵢ = wᵢ − w, one weight sum per name, in a running sum.

    It holds one sum, whatever the number of replies, and turns each reply into its update in place: with the
    model and one reply, three models are in memory. Names that only some clients send are averaged over those
    that sent them; a name that no client sent has no update. With `zero_fill` the mean is over all clients of
    the round: a name that a client did not send counts as a zero update. In the namespaces `equal`
    (`PARAMETERS`: in the model too) all replies have the same weight, whatever their number of examples.

    `group` returns the part of the model to which a parameter's drift belongs, or None to leave it out.
    """

    def __init__(
        self,
        model: Mapping[str, Tensor],
        group: Callable[[str], str | None],
        gate: NormGate | None = None,
        *,
        zero_fill: bool = False,
        equal: Collection[str] = (),
    ) -> None:
        self._model = model
        self.gate = gate
        self._zero_fill = zero_fill
        self._equal = equal
        self._taken = Taken()
        self._group = group
        self._sum: dict[str, Tensor] = {}
        self._weight: dict[str, float] = {}
        self._square: dict[str, Tensor] = {}  # Σ nᵢ‖uᵢ‖² in float64
        self._block: OpenBlock | None = None
        self._parts: list[SummedPart] = []
        self._scratch = torch.empty(CHUNK, dtype=torch.float64)

    def add(self, arrays: Mapping[str, Tensor], weight: float) -> str | None:
        """Add one reply. Returns the reason if it is refused; then nothing was added."""
        if isinstance(arrays, Slice):
            return self._add_row(arrays, weight)
        if isinstance(arrays, SummedReply):
            return self._add_summed(arrays)
        names = [name for name in arrays if not namespace_of(name)]
        # The reply becomes the update.
        updates, bases = [arrays[name] for name in names], [self._model[name] for name in names]
        found = dict(zip(names, subtract(updates, bases, self._scratch), strict=True))
        norms = {n: found[n] if n in found else norm_of(a, self._scratch) for n, a in arrays.items()}
        return self._add(arrays, norms, weight)

    def update_of(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of the update in a reply to this round, to be added in a later round."""
        if isinstance(arrays, Slice):  # opening its block has turned all rows into updates
            updates = self._opened(arrays.block).block.slice(arrays.number)
            return {name: value.clone() for name, value in updates.items()}
        return {
            name: value.clone() if namespace_of(name) else value - self._model[name]
            for name, value in arrays.items()
        }

    def add_update(self, update: dict[str, Tensor], weight: float) -> str | None:
        """Like `add`, for the update of a reply to an earlier round; reuses its memory."""
        norms = {name: norm_of(value, self._scratch) for name, value in update.items()}
        return self._add(update, norms, weight)

    def _add(self, arrays: Mapping[str, Tensor], norms: Mapping[str, Tensor], weight: float) -> str | None:
        # A NaN or infinity makes its tensor's norm non-finite: one check for the whole reply.
        if norms and not (torch.stack(list(norms.values())) * weight < TOO_LARGE).all():
            return unsound({name: float(norm) * weight for name, norm in norms.items()})
        parameter_norms = [norm for name, norm in norms.items() if not namespace_of(name)]
        if (
            parameter_norms
            and self.gate
            and (far := self.gate.problem(float(torch.linalg.vector_norm(torch.stack(parameter_norms)))))
        ):
            return far
        self._taken.examples += weight
        self._taken.replies += 1
        if not arrays:
            return None
        counts, each = {name: self.counts(name, weight, 1) for name in arrays}, list(norms.values())
        squares = dict(
            zip(norms, torch._foreach_mul(torch._foreach_mul(each, each), list(counts.values())), strict=True)
        )
        known = [name for name in arrays if name in self._sum]
        for count in {counts[name] for name in known}:  # one kernel launch for all names of equal weight
            alike = [name for name in known if counts[name] == count]
            sums, added = [self._sum[name] for name in alike], [arrays[name] for name in alike]
            torch._foreach_add_(sums, added, alpha=count)
        for name in known:
            self._weight[name] += counts[name]
        if known:
            torch._foreach_add_([self._square[name] for name in known], [squares[name] for name in known])
        for name, update in arrays.items():
            if name not in self._sum:
                # Not in place: a client in this process may keep the sent array.
                self._sum[name] = update * counts[name] if namespace_of(name) else update.mul_(counts[name])
                self._weight[name], self._square[name] = counts[name], squares[name]
        return None

    def add_sums(self, sums: Sums) -> None:
        """Add the sums of a whole round's masked replies, in place of the replies."""
        self._taken = Taken(float(sums.examples), sums.replies)
        for name, total in sums.arrays.items():
            if sums.weights[name]:  # some client sent it
                own = self._model[parameter_of(name)]
                self._sum[name] = total.to(own)
                self._weight[name] = sums.weights[name]
                self._square[name] = torch.tensor(sums.squares[name], dtype=torch.float64, device=own.device)

    def counts(self, name: str, examples: float, replies: int) -> float:
        """The weight of `examples` from `replies` replies in this name's mean."""
        return float(replies) if namespace_of(name) in self._equal else examples

    # The rows of a block are summed together, as one matrix product.

    def expect(self, arrays: Mapping[str, Tensor]) -> None:
        """Announce a reply that will be added next, unchanged: starts computing the norms of its block."""
        if isinstance(arrays, Slice):
            self._opened(arrays.block)

    def _add_row(self, row: Slice, weight: float) -> str | None:
        return self._opened(row.block).accept(row.number, weight)

    def _opened(self, block: Block) -> OpenBlock:
        if self._block is None or self._block.block is not block:
            self._close_block()
            self._block = OpenBlock(block, self.gate, self._equal)
        return self._block

    def _close_block(self) -> None:
        if self._block is None or not (weight := sum(self._block.weights)):
            return
        taken = sum(each > 0 for each in self._block.weights)
        sums, squares = self._block.fold()
        self._fold(sums, squares, {name: self.counts(name, weight, taken) for name in sums}, weight, taken)
        self._block = None

    def _fold(
        self,
        sums: Mapping[str, Tensor],
        squares: Mapping[str, Tensor],
        counts: Mapping[str, float],
        examples: float,
        taken: int,
    ) -> None:
        """Add the sums of `taken` replies; `counts`: their weights in the mean, by name."""
        self._taken.examples += examples
        self._taken.replies += taken
        for name, total in sums.items():
            if name in self._sum:
                self._sum[name].add_(total)
                self._weight[name] += counts[name]
                self._square[name] += squares[name]
            else:
                self._sum[name], self._weight[name], self._square[name] = total, counts[name], squares[name]

    # Parts of a round that were summed where the clients trained.

    def partial(self) -> PartialSums:
        """The sums so far, to be combined into a whole round's mean. Do not use this object afterwards."""
        self._close_block()
        return PartialSums(self._sum, self._weight, self._square, self._taken.examples, self._taken.replies)

    def _add_summed(self, reply: SummedReply) -> str | None:
        part = reply.part
        if reply.refused is not None:
            return reply.refused
        if self.gate and reply.norm is not None:
            self.gate.problem(reply.norm)  # for the median: the norm was already checked where it trained
        if not any(part is known for known in self._parts):
            own = part.sums
            self._fold(own.sums, own.squares, own.weights, own.examples, own.replies)
            self._parts.append(part)
        part.taken.add(reply.number)
        return None

    def predict(self, replies: int) -> Update | None:
        """The result of `finish` if all `replies` are accepted, from the same sums; None if the expected
        block does not contain all of them. Its computation starts before the replies are checked."""
        block = self._block
        if block is None or len(block.all) != replies or not all(block.all):
            return None
        likely = RunningMean(self._model, self._group, zero_fill=self._zero_fill, equal=self._equal)
        sums, squares = block.sum_of_all
        weight = sum(block.all)
        counts = {name: likely.counts(name, weight, replies) for name in sums}
        likely._fold(sums, squares, counts, weight, replies)
        block.predicted = likely.finish()
        return block.predicted

    def problem(self) -> str | None:
        """Why the replies cannot be combined; None for a mean."""
        return None

    def finish(self) -> Update:
        """The means, in the sums' own memory. Do not use this object afterwards."""
        block = self._block
        if block is not None and block.predicted is not None and block.weights == block.all:
            return block.predicted
        self._close_block()
        for part in self._parts:
            part.check()
        if self._zero_fill:
            self._weight = {
                name: self.counts(name, self._taken.examples, self._taken.replies) for name in self._sum
            }
        update = Update(replies=self._taken.replies)
        for name, total in self._sum.items():
            if space := namespace_of(name):
                update.extra.setdefault(space, {})[name.removeprefix(f"{space}/")] = total.div_(
                    self._weight[name]
                )
            else:
                update.model[name] = total
        self._sum = {}
        weights = [self._weight[name] for name in update.model]
        norms = divide(list(update.model.values()), weights, self._scratch)
        if norms:
            # One synchronisation for all names, and only if the drift is read.
            norms_and_squares = torch.stack([*norms, *(self._square[name] for name in update.model)])
            update.measured = partial(self._drift, list(update.model), norms_and_squares)
        return update

    def _drift(self, names: Sequence[str], found: Tensor) -> Drift:
        """RMS drift is √(Σ wᵢ‖uᵢ‖² − ‖Σ wᵢuᵢ‖²); also the norm of the mean update."""
        spread: dict[str, float] = {}
        common: dict[str, float] = {}
        values = found.tolist()
        for name, norm, square in zip(names, values, values[len(names) :], strict=False):
            group = self._group(name)
            if group is not None:
                common[group] = common.get(group, 0.0) + norm**2
                spread[group] = spread.get(group, 0.0) + square / self._weight[name] - norm**2
        return {
            group: {"rms": math.sqrt(max(spread[group], 0.0)), "mean_update": math.sqrt(common[group])}
            for group in common
        }
