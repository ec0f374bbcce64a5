"""Flower's contexts of the nodes in this process, created at a client's first message.

Clients' kept state is in memory up to a limit. Beyond it everything is written to the run's folder
(files/client_segments.py), and the least recently used clients are read back when they are drawn again.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import cast

from flwr.app import ArrayRecord, Context, RecordDict
from torch import Tensor

from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.files.client_segments import ClientSegments

PRIVATE = "private"  # of a context's state: see local/client_state.py
WITHOUT_LOSS = {PRIVATE, "card"}  # a context that holds no more can be made again
IDLE = 10_000  # contexts that hold nothing; more of them are dropped


class NodeContexts(MutableMapping[int, Context]):
    """Contexts by node id, for partitions 0 to `num_partitions` - 1. Unused or empty ones can be recreated:
    only clients with state take memory."""

    def __init__(self, num_partitions: int, run_config: dict[str, str]) -> None:
        self._count, self._run_config = num_partitions, run_config
        self._made: dict[int, Context] = {}  # least recently used first
        self._segments: ClientSegments | None = None
        self._limit = 0
        self._asked: set[int] = set()  # since the sizes were last added up
        self._sizes: dict[int, int] = {}  # bytes of kept state, of contexts in memory
        self._written: dict[int, ArrayRecord] = {}  # of these, what the segments have of them

    def __getitem__(self, node: int) -> Context:
        self._asked.add(node)
        if node in self._made:
            self._made[node] = context = self._made.pop(node)
            return context
        if not 1 <= node <= self._count:
            raise KeyError(node)
        self._made[node] = context = self._make(node)
        if self._segments is not None and node - 1 in self._segments:
            self._written[node] = record = to_record(self._segments.read(node - 1), local=True)
            context.state[PRIVATE] = record
        return context

    def __setitem__(self, node: int, context: Context) -> None:
        self._asked.add(node)
        self._made[node] = context

    def __delitem__(self, node: int) -> None:
        raise NotImplementedError("a node of this process stays until the run ends")

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, self._count + 1))

    def __len__(self) -> int:
        return self._count

    def made(self) -> list[Context]:
        """Those that exist, in the order of their nodes."""
        return [self._made[node] for node in sorted(self._made)]

    # What clients keep ----------------------------------------------------------------------------------

    def spill_to(self, segments: ClientSegments, limit_bytes: int) -> None:
        """Keep at most `limit_bytes` of state in memory between two rounds, and the rest in `segments`."""
        self._segments, self._limit = segments, limit_bytes

    @property
    def spilled(self) -> bool:
        return self._segments is not None and len(self._segments) > 0

    def states(self) -> dict[int, dict[str, Tensor]]:
        """The kept arrays of each partition's client, of contexts in memory."""
        return {node - 1: to_tensors(record) for node in sorted(self._made) if (record := self._kept(node))}

    def restore(self, states: Mapping[int, Mapping[str, Tensor]]) -> None:
        for partition, arrays in states.items():
            if 0 <= partition < self._count:
                self[partition + 1].state[PRIVATE] = to_record(arrays, local=True)

    def trim(self) -> None:
        """Between two rounds, when no client is busy: drop empty contexts; if clients' state exceeds the
        memory limit, write it and drop half of it."""
        self._add_up()
        if len(self._made) - len(self._sizes) >= IDLE:
            self._made = {node: context for node, context in self._made.items() if len(context.state)}
        total = sum(self._sizes.values())
        if self._segments is None or total <= self._limit:
            return
        self.write_changed()
        for node in list(self._made):
            if total <= self._limit // 2:
                break
            if set(self._made[node].state) <= WITHOUT_LOSS:
                total -= self._sizes.pop(node, 0)
                self._written.pop(node, None)
                del self._made[node]

    def write_changed(self) -> None:
        """Write a segment with the clients whose arrays are in none yet."""
        assert self._segments is not None
        self._add_up()
        new = {node: self._kept(node) for node in self._sizes}
        changed = {node: record for node, record in new.items() if record is not self._written.get(node)}
        self._segments.write({node - 1: to_tensors(record) for node, record in changed.items() if record})
        self._written |= {node: record for node, record in changed.items() if record}

    def _add_up(self) -> None:
        for node in self._asked:
            if node in self._made and (record := self._kept(node)):
                tensors = to_tensors(record).values()
                self._sizes[node] = sum(value.numel() * value.element_size() for value in tensors)
        self._asked.clear()

    def _kept(self, node: int) -> ArrayRecord | None:
        return cast(ArrayRecord | None, self._made[node].state.get(PRIVATE))

    def _make(self, node: int) -> Context:
        return Context(
            run_id=0,
            node_id=node,
            node_config={
                "partition-id": node - 1,
                "num-partitions": self._count,
                "in-process": True,
            },
            state=RecordDict(),
            run_config=dict(self._run_config),
        )
