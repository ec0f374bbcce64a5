"""The starting row of each client of a stacked round: the round's model, and the client's own arrays."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import Tensor

from fedfrozen_app.exchange.names import by_namespace, flattened, parameters_in, with_namespace
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.layouts import START, Layouts


class ClientStarts:
    """Starting rows of stacked clients. `start`: the row that all share; `kept`: each client's own arrays."""

    def __init__(
        self,
        layouts: Layouts,
        request: TrainRequest,
        start: Tensor,
        kept: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self._layouts, self.method, self._start, self._kept = layouts, request.method, start, kept
        self.held: dict[int, Tensor] = {}  # arrays that the clients in training only read
        self._nothing = start[:0]
        self._row = layouts.trained.views(start)

    @cached_property
    def common(self) -> dict[str, Tensor]:
        """The parameters of the shared row."""
        return parameters_in(self._row)

    def begin(self, client: int) -> Tensor:
        """(width,) the client's trained arrays; those that it only reads go into `held`."""
        kept = self._kept[client]
        if not kept and not self.method.client_state and not self.method.evaluates_start():
            self.held[client] = self._nothing
            return self._start
        model = {**self.common, **parameters_in(kept)}
        trained = {name: model[name] for name in self._layouts.names}
        own = flattened(self.method.start(trained, by_namespace(kept)))
        began = {with_namespace(START, name): value for name, value in model.items()}
        held = self._layouts.held
        unset = held.views(self._start.new_zeros(held.width))  # known only when the client begins
        self.held[client] = held.flatten({**unset, **own, **began})
        return self._layouts.trained.flatten({**self._row, **model, **own})

    def replace(self, client: int, row: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """The client's trained row with these arrays in place of the initial ones; also updates `held`."""
        held, trained = self._layouts.held, self._layouts.trained
        self.held[client] = held.flatten({**held.views(self.held[client]), **own})
        return trained.flatten({**trained.views(row), **own})
