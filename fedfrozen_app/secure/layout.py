"""The layout of a round's vector, by name, and how floats become integers and back.

    body    each value of each array of the request: round(weight · clip(update) · scale); the weight is the
            client's number of examples, or 1 if all clients have equal weight
    head    replies, examples, examples², clipped values; per array weight · ‖update‖² and, if clients choose
            layers, the weight; per metric its number of examples, and the metric times that number; where
            the bound is a quantile, whether this client's update stays within it

A metric is in the sum if every client of the sum has it. A client without it fills both slots with random
numbers, which hides the metric of the others, even of a single one, and which clients lack it.

`scale` lets the sum of a whole cohort fit into the body's bits, so that integer sums are exact. Rounding is
stochastic and unbiased; its error in the sum of weight · update is less than 1/scale per client. In rings of
less than 16 bits each client has L = ⌊(2^(b−1) − 1)/cohort⌋ levels on each side, and stays within them. With
`rotate`, parameters are rotated first (see `rotation.py`): sums of rotated updates are rotated sums.
"""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.exchange.codecs.rotation import LONGEST, rotated, unrotated
from fedfrozen_app.exchange.names import namespace_of
from fedfrozen_app.secure.vector import Vector, packed_size, signed, signed_word

FRACTION = 2.0**20  # units of a metric or a square
LARGEST = 2.0**61  # bound of a sum in the head, over the whole cohort
LARGE = 16  # bits: smaller rings limit each client to `levels`
REPLIES, EXAMPLES, SQUARES, CLIPPED, FIXED = 0, 1, 2, 3, 4
WITHIN = FIXED  # in a bare head with a count
FEW = 1e-3  # share of values that may be clipped: 7·10⁻⁴ of a normal variable lie beyond 3.4 σ
CHUNK = 1 << 16


@dataclass(frozen=True)
class Arithmetic:
    """What all clients of a round must agree on so that their vectors can be added."""

    bits: int
    clip: float  # largest absolute value of a parameter's update
    state_clip: float  # the same for arrays that are not parameters
    max_examples: int  # the largest weight of a client
    cohort: int  # clients that may be in the sum
    margin: float = 0.0  # share of the body's range that is left for noise
    rotate: bool = False  # parameters are rotated before they are clipped

    def weight(self, examples: int) -> int:
        return min(examples, self.max_examples)

    @property
    def levels(self) -> int | None:
        """In a small ring, the largest number that each client of the cohort may add without overflow of the
        sum. None in a large ring, where a step is too small to matter."""
        if self.bits >= LARGE:
            return None
        return int((2 ** (self.bits - 1) - 1) * (1 - self.margin)) // self.cohort

    @property
    def problem(self) -> str | None:
        """Why sums over this cohort could overflow; None if they never do."""
        if self.levels is None or self.levels:
            return None
        return f"numbers of {self.bits} bits are too small for a cohort of {self.cohort}: raise bits"

    def rotates(self, name: str) -> bool:
        return self.rotate and not namespace_of(name)

    def scale(self, name: str, equal: Collection[str]) -> float:
        """Units of the body for one unit of weight · update."""
        space = namespace_of(name)
        bound = self.state_clip if space else self.clip
        most = 1 if space in equal else self.max_examples
        if self.levels is not None:
            return self.levels / (most * bound)
        room = (2 ** (self.bits - 1) - 1) * (1 - self.margin) - self.cohort
        return room / (self.cohort * most * bound)


@dataclass(frozen=True)
class SumLayout:
    shapes: Mapping[str, torch.Size]  # of every array of the request, in this order
    figures: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()  # namespaces in which all clients have equal weight
    chosen: bool = False  # clients send some of the arrays; the others count as zero
    bare: bool = False  # the head holds replies and examples only
    counted: bool = False  # the head also counts clients within the bound

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {name: shape.numel() for name, shape in self.shapes.items()}

    @cached_property
    def body(self) -> int:
        return sum(self.sizes.values())

    @cached_property
    def _slots(self) -> dict[tuple[str, str], int]:
        """Positions in the head, after the fixed ones."""
        counted = [("within", "")] if self.counted else []
        if self.bare:
            return dict.fromkeys(counted, WITHIN)
        keys = [("square", name) for name in self.shapes]
        keys += [("weight", name) for name in self.shapes if self.chosen]
        keys += [(part, name) for name in self.figures for part in ("behind", "figure")]
        keys += counted
        return {key: FIXED + number for number, key in enumerate(keys)}

    @property
    def head(self) -> int:
        return FIXED + len(self._slots)

    def bytes(self, bits: int) -> int:
        return packed_size(self.head, self.body, bits)

    def weight_of(self, name: str, weight: int) -> int:
        return 1 if namespace_of(name) in self.equal else weight


@dataclass(frozen=True)
class Sums:
    """The decoded sum of a round's vectors."""

    replies: int
    examples: int
    examples_squared: int
    clipped: int
    arrays: dict[str, Tensor]  # Σ weight · update, float64
    weights: dict[str, float]
    squares: dict[str, float]  # Σ weight · ‖update‖²
    figures: dict[str, tuple[float, int]]  # mean by examples, and those examples
    within: float = 0.0  # clients whose updates are within the bound, if counted


def encode(
    layout: SumLayout,
    rules: Arithmetic,
    updates: Mapping[str, Tensor],
    examples: int,
    figures: Mapping[str, float],
    drawn: np.random.Generator,
) -> Vector:
    """A client's vector. `updates` holds differences; arrays that it does not send count as zero.

    `ValueError`, as the rest of a sentence, if a value is not finite.
    """
    if rules.problem:
        raise ValueError(f"cannot be sent: {rules.problem}")
    vector = Vector.zeros(layout.head, layout.body, rules.bits)
    head, weight = vector.head.view(np.dtype("<i8")), rules.weight(examples)
    numbers = vector.body.view(signed_word(vector.body.dtype))
    head[REPLIES], head[EXAMPLES] = 1, weight
    start, clipped, values = 0, 0, 0
    for name, size in layout.sizes.items():
        place = numbers[start : start + size]
        start += size
        if name not in updates:
            continue
        if updates[name].shape != layout.shapes[name]:
            raise ValueError(f"has the shape {tuple(updates[name].shape)} for {name}")
        counts = layout.weight_of(name, weight)
        bound = rules.state_clip if namespace_of(name) else rules.clip
        scale = counts * rules.scale(name, layout.equal)
        update = turned(updates[name]) if rules.rotates(name) else updates[name]
        over, square = _round_into(place, update, scale, bound, drawn, rules.levels)
        if not np.isfinite(square):
            raise ValueError(f"has values that are not finite in {name}")
        clipped, values = clipped + over, values + size
        if not layout.bare:
            head[layout._slots["square", name]] = _fixed(square * counts, rules.cohort)
            if layout.chosen:
                head[layout._slots["weight", name]] = counts
    if layout.counted:
        head[layout._slots["within", ""]] = round(FRACTION) if clipped <= FEW * values else 0
    if layout.bare:
        return vector
    head[SQUARES], head[CLIPPED] = weight**2, clipped
    for name in layout.figures:
        value = figures.get(name)
        behind, figure = layout._slots["behind", name], layout._slots["figure", name]
        if value is not None and np.isfinite(value):
            head[behind], head[figure] = weight, _fixed(value * weight, rules.cohort)
        else:  # uniform modulo 2^64, and so is every sum with it
            head[behind], head[figure] = np.frombuffer(os.urandom(16), head.dtype)
    return vector


def turned(update: Tensor) -> Tensor:
    return torch.from_numpy(rotated(update.detach().reshape(-1).cpu().double().numpy()))


def _round_into(
    place: np.ndarray,
    update: Tensor,
    scale: float,
    bound: float,
    drawn: np.random.Generator,
    levels: int | None,
) -> tuple[int, float]:
    """(number of clipped values, ‖update‖² after clipping); writes the rounded values to `place`."""
    flat = update.detach().reshape(-1).cpu()
    over, square = 0, 0.0
    for start in range(0, len(flat), CHUNK):
        piece = flat[start : start + CHUNK].double().numpy()
        worst = max(abs(piece.max()), abs(piece.min()))
        if not worst <= bound:
            if not np.isfinite(piece).all():
                return over, float("nan")
            over += int((np.abs(piece) > bound).sum())
            piece = piece.clip(-bound, bound)
        square += float(np.dot(piece, piece))
        scaled = piece * scale
        scaled += drawn.random(len(piece), dtype=np.float32)
        np.floor(scaled, out=scaled)
        if levels is not None:  # rounding of `scale` itself must not exceed the levels
            scaled.clip(-levels, levels, out=scaled)
        place[start : start + len(piece)] = scaled
    return over, square


def decode(layout: SumLayout, rules: Arithmetic, vector: Vector) -> Sums:
    """The sums in a vector whose masks were removed."""
    head, body = signed(vector, rules.bits)
    examples, replies = int(head[EXAMPLES]), int(head[REPLIES])
    arrays, start = {}, 0
    for name, shape in layout.shapes.items():
        size = shape.numel()
        values = body[start : start + size].astype(np.float64)
        values /= rules.scale(name, layout.equal)
        if rules.rotates(name):
            values = unrotated(values)
        arrays[name] = torch.from_numpy(values).reshape(shape)
        start += size
    weights = {
        name: float(head[layout._slots["weight", name]])
        if layout.chosen and not layout.bare
        else float(replies if namespace_of(name) in layout.equal else examples)
        for name in layout.shapes
    }
    figures = {}
    for name in () if layout.bare else layout.figures:
        behind = int(head[layout._slots["behind", name]])
        if 0 < behind == examples:  # all clients have it, except with probability 2^-64
            figures[name] = int(head[layout._slots["figure", name]]) / FRACTION / behind, behind
    squares = {
        name: 0.0 if layout.bare else int(head[layout._slots["square", name]]) / FRACTION
        for name in layout.shapes
    }
    within = int(head[layout._slots["within", ""]]) / FRACTION if layout.counted else 0.0
    fixed = (replies, examples, int(head[SQUARES]), int(head[CLIPPED]))
    return Sums(*fixed, arrays, weights, squares, figures, within)


def added(parts: Sequence[Sums]) -> Sums:
    """The sum of several cohorts' sums; an array that a cohort did not send counts as zero there."""
    arrays: dict[str, Tensor] = {}
    weights: dict[str, float] = {}
    squares: dict[str, float] = {}
    figures: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, total in part.arrays.items():
            arrays[name] = arrays[name] + total if name in arrays else total
            weights[name] = weights.get(name, 0.0) + part.weights[name]
            squares[name] = squares.get(name, 0.0) + part.squares[name]
        for name, (mean, behind) in part.figures.items():
            other, before = figures.get(name, (0.0, 0))
            figures[name] = (mean * behind + other * before) / (behind + before), behind + before
    return Sums(
        sum(part.replies for part in parts),
        sum(part.examples for part in parts),
        sum(part.examples_squared for part in parts),
        sum(part.clipped for part in parts),
        *(arrays, weights, squares, figures),
        sum(part.within for part in parts),
    )


def error_bound(layout: SumLayout, rules: Arithmetic, name: str, replies: int, weight: float) -> float:
    """The largest error of rounding in the mean of this array: less than one unit per reply. A rotation may
    gather those of a whole segment in one value, in the worst case."""
    widest = math.sqrt(min(LONGEST, layout.sizes[name])) if rules.rotates(name) else 1.0
    return replies / (rules.scale(name, layout.equal) * weight) * widest


def _fixed(value: float, cohort: int) -> int:
    most = LARGEST / cohort
    return round(min(max(value * FRACTION, -most), most))
