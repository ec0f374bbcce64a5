"""Many clients' arrays as the rows of one matrix, and one client's slice of it as an ordinary reply."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedfrozen_app.exchange.names import namespace_of

ALIGN = 64  # elements: every parameter starts aligned for vectorised loads


@dataclass(frozen=True)
class Layout:
    """Where each named array lies in a row."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    spans: tuple[int, ...]  # elements of each name in the row, padding included

    @classmethod
    def of(cls, arrays: Mapping[str, Tensor]) -> "Layout":
        spans = (-(-value.numel() // ALIGN) * ALIGN for value in arrays.values())
        return cls(tuple(arrays), tuple(value.shape for value in arrays.values()), tuple(spans))

    def followed_by(self, other: "Layout") -> "Layout":
        """The layout of this layout's rows followed by another's."""
        return Layout(self.names + other.names, self.shapes + other.shapes, self.spans + other.spans)

    @property
    def width(self) -> int:
        return sum(self.spans)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """(…, width) -> name: (…, *shape). One split, so that its gradient is one concatenation."""
        if not self.names:
            return {}
        lead = rows.shape[:-1]
        parts = rows.split(self.spans, dim=-1)
        return {
            # Most need no padding: skipping the slice saves a thirtieth of a small model's step.
            name: (part if shape.numel() == span else part[..., : shape.numel()]).reshape((*lead, *shape))
            for name, shape, span, part in zip(self.names, self.shapes, self.spans, parts, strict=True)
        }

    def flatten(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Named arrays -> (width,), padding zero."""
        if not self.names:
            return next(iter(arrays.values())).new_zeros(0)
        flat = [arrays[name].detach().reshape(-1) for name in self.names]
        row = flat[0].new_zeros(self.width)
        places = zip(row.split(self.spans), self.shapes, strict=True)
        # One copy for all: on a GPU, padding each separately would cost two launches per name.
        torch._foreach_copy_([place[: shape.numel()] for place, shape in places], flat)
        return row


@dataclass
class Block:
    """The clients of a block after training: `values` has one row per client."""

    clients: tuple[str, ...]
    layout: Layout
    base: Tensor  # (width,) the row from which all of them started
    values: Tensor  # (clients, width)
    examples: Sequence[int]
    metrics: dict[str, Tensor] = field(default_factory=dict)  # name: (clients,)
    extra_metrics: Sequence[dict[str, float]] = ()  # by client: metrics that only some clients have
    kept: Sequence[dict[str, Tensor]] = ()  # by client: its private arrays, which are in no slice
    _there: dict[str, Tensor] = field(default_factory=dict, init=False)  # name: (clients,), to be copied
    _here: dict[str, list[float]] = field(default_factory=dict, init=False)  # name: values copied to the host

    def shared(self, names: tuple[str, ...], dropped: Collection[str] = ()) -> "Block":
        """The block with only these names, the first ones of its layout; the others become the clients' kept
        arrays, except for those of the namespaces `dropped`."""
        layout = Layout(names, self.layout.shapes[: len(names)], self.layout.spans[: len(names)])
        rest = [name for name in self.layout.names[len(names) :] if namespace_of(name) not in dropped]
        rows = [self.layout.views(row) for row in self.values]
        return replace(
            self,
            layout=layout,
            base=self.base[: layout.width],
            values=self.values[:, : layout.width],
            kept=[{name: row[name].clone() for name in rest} for row in rows] if rest else (),
        )

    def slice(self, number: int) -> "Slice":
        return Slice(self, number)

    def look_at(self, name: str, values: Tensor) -> None:
        """Queue these values, (clients,), to be copied to the host with the next metrics."""
        self._there[name] = values

    def seen(self, name: str) -> list[float]:
        """A metric, or values from `look_at`, on the host: one synchronisation copies all pending values,
        whatever the number of clients."""
        if name not in self._here:
            there = {n: v for n, v in {**self.metrics, **self._there}.items() if n not in self._here}
            table = torch.stack([value.double().to(self.values.device) for value in there.values()])
            self._here.update(zip(there, table.tolist(), strict=True))
        return self._here[name]

    def metrics_of(self, number: int) -> dict[str, float]:
        """The metrics of one client."""
        own = {name: self.seen(name)[number] for name in self.metrics}
        return own | {name: float(value) for name, value in self.extra_metrics[number].items()}


class Slice(Mapping[str, Tensor]):
    """One client's arrays in a block. Names and shapes are those of the layout by construction."""

    def __init__(self, block: Block, number: int) -> None:
        self.block, self.number = block, number

    @cached_property
    def _views(self) -> dict[str, Tensor]:
        return self.block.layout.views(self.block.values[self.number])

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.block.layout.names)

    def __len__(self) -> int:
        return len(self.block.layout.names)
