"""Flower's contexts of the nodes in this process, made when a client is first asked."""

from collections.abc import Iterator, MutableMapping

from flwr.app import Context, RecordDict

IDLE = 10_000  # contexts that hold nothing; more of them are dropped


class NodeContexts(MutableMapping[int, Context]):
    """By node id, for partitions 0 to `num_partitions` - 1. One that was never asked for, or that holds
    nothing, can be made again: only clients with a state of their own take memory."""

    def __init__(self, num_partitions: int, run_config: dict[str, str]) -> None:
        self._count, self._run_config = num_partitions, run_config
        self._made: dict[int, Context] = {}

    def __getitem__(self, node: int) -> Context:
        if node not in self._made:
            if not 1 <= node <= self._count:
                raise KeyError(node)
            self._drop_idle()
            self._made[node] = self._make(node)
        return self._made[node]

    def __setitem__(self, node: int, context: Context) -> None:
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

    def _drop_idle(self) -> None:
        if len(self._made) < IDLE:
            return
        kept = {node: context for node, context in self._made.items() if len(context.state)}
        if len(kept) <= len(self._made) - IDLE // 2:
            self._made = kept
