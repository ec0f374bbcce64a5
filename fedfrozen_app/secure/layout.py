"""Where everything lies in a round's vector, by name, and how numbers become whole numbers and back.

    body    for each array of the order, each value: round(weight · clip(update) · scale), weight the client's
            examples, or 1 where every client counts alike
    head    replies, examples, examples², values that were clipped; of each array weight · ‖update‖² and,
            where clients choose layers, weight; of each figure the examples behind it, and both multiplied

`scale` makes the sum of a whole cohort fit into the body's bits, so that sums of whole numbers are exact.
What is lost is rounding: less than 1/scale for each client, in the sum of weight · update. Rounding is up or
down by chance, right on average.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.exchange.names import namespace_of
from fedfrozen_app.secure.vector import Vector, packed_size, signed

FRACTION = 2.0**20  # of figures and squares: the smallest part of one that counts
LARGEST = 2.0**61  # of a head's number over the whole cohort
REPLIES, EXAMPLES, SQUARES, CLIPPED, FIXED = 0, 1, 2, 3, 4
CHUNK = 1 << 16


@dataclass(frozen=True)
class Arithmetic:
    """What all clients of a round must agree on to be added up."""

    bits: int
    clip: float  # largest value of a parameter's update
    state_clip: float  # of an array beside parameters
    max_examples: int  # no client counts for more
    cohort: int  # clients that may be in the sum
    margin: float = 0.0  # of the body's range, for noise

    def weight(self, examples: int) -> int:
        return min(examples, self.max_examples)

    def scale(self, name: str, equal: Collection[str]) -> float:
        """Units of the body for one unit of weight · update."""
        space = namespace_of(name)
        bound = self.state_clip if space else self.clip
        most = 1 if space in equal else self.max_examples
        room = (2 ** (self.bits - 1) - 1) * (1 - self.margin) - self.cohort
        return room / (self.cohort * most * bound)


@dataclass(frozen=True)
class Layout:
    shapes: Mapping[str, torch.Size]  # of every array that the order has sent, in this order
    figures: tuple[str, ...] = ()
    equal: tuple[str, ...] = ()  # namespaces in which every client counts alike
    chosen: bool = False  # clients send part of the arrays, and the rest counts as zero
    bare: bool = False  # nothing but replies and examples beside the arrays

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {name: shape.numel() for name, shape in self.shapes.items()}

    @cached_property
    def body(self) -> int:
        return sum(self.sizes.values())

    @cached_property
    def _slots(self) -> dict[tuple[str, str], int]:
        """Of the head, behind the fixed ones."""
        if self.bare:
            return {}
        keys = [("square", name) for name in self.shapes]
        keys += [("weight", name) for name in self.shapes if self.chosen]
        keys += [(part, name) for name in self.figures for part in ("behind", "figure")]
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
    """What a round's vectors add up to."""

    replies: int
    examples: int
    examples_squared: int
    clipped: int
    arrays: dict[str, Tensor]  # Σ weight · update, float64
    weights: dict[str, float]
    squares: dict[str, float]  # Σ weight · ‖update‖²
    figures: dict[str, tuple[float, int]]  # mean by examples, and those examples


def encode(
    layout: Layout,
    rules: Arithmetic,
    updates: Mapping[str, Tensor],
    examples: int,
    figures: Mapping[str, float],
    drawn: np.random.Generator,
) -> Vector:
    """A client's vector. `updates` holds differences; arrays that it does not send count as zero.

    `ValueError`, as the rest of a sentence, where a value is not finite.
    """
    vector = Vector.zeros(layout.head, layout.body)
    head, weight = vector.head.view(np.dtype("<i8")), rules.weight(examples)
    head[REPLIES], head[EXAMPLES] = 1, weight
    start, clipped = 0, 0
    for name, size in layout.sizes.items():
        place = vector.body[start : start + size].view(np.dtype("<i4"))
        start += size
        if name not in updates:
            continue
        if updates[name].shape != layout.shapes[name]:
            raise ValueError(f"has the shape {tuple(updates[name].shape)} for {name}")
        counts = layout.weight_of(name, weight)
        bound = rules.state_clip if namespace_of(name) else rules.clip
        scale = counts * rules.scale(name, layout.equal)
        over, square = _round_into(place, updates[name], scale, bound, drawn)
        if not np.isfinite(square):
            raise ValueError(f"has values that are not finite in {name}")
        clipped += over
        if not layout.bare:
            head[layout._slots["square", name]] = _fixed(square * counts, rules.cohort)
            if layout.chosen:
                head[layout._slots["weight", name]] = counts
    if layout.bare:
        return vector
    head[SQUARES], head[CLIPPED] = weight**2, clipped
    for name in layout.figures:
        value = figures.get(name)
        if value is not None and np.isfinite(value):
            head[layout._slots["behind", name]] = weight
            head[layout._slots["figure", name]] = _fixed(value * weight, rules.cohort)
    return vector


def _round_into(
    place: np.ndarray, update: Tensor, scale: float, bound: float, drawn: np.random.Generator
) -> tuple[int, float]:
    """(how many values were clipped, ‖update‖² after that); the rounded values go to `place`."""
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
        place[start : start + len(piece)] = np.floor(scaled, out=scaled)
    return over, square


def decode(layout: Layout, rules: Arithmetic, vector: Vector) -> Sums:
    """Of a sum of vectors without their masks."""
    head, body = signed(vector, rules.bits)
    examples, replies = int(head[EXAMPLES]), int(head[REPLIES])
    arrays, start = {}, 0
    for name, shape in layout.shapes.items():
        size = shape.numel()
        values = body[start : start + size].astype(np.float64)
        values /= rules.scale(name, layout.equal)
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
        if behind > 0:
            figures[name] = int(head[layout._slots["figure", name]]) / FRACTION / behind, behind
    squares = {
        name: 0.0 if layout.bare else int(head[layout._slots["square", name]]) / FRACTION
        for name in layout.shapes
    }
    return Sums(
        *(replies, examples, int(head[SQUARES]), int(head[CLIPPED])), arrays, weights, squares, figures
    )


def added(parts: Sequence[Sums]) -> Sums:
    """The sums of several cohorts as one; an array that one of them did not send counts as zero there."""
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
    )


def error_bound(layout: Layout, rules: Arithmetic, name: str, replies: int, weight: float) -> float:
    """How far rounding can move the mean of this array's values: less than one unit for each reply."""
    return replies / (rules.scale(name, layout.equal) * weight)


def _fixed(value: float, cohort: int) -> int:
    most = LARGEST / cohort
    return round(min(max(value * FRACTION, -most), most))
