"""Where each client of a stacked round starts: the round's model, and what the client keeps for itself."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import Tensor

from fedfrozen_app.exchange.names import by_namespace, flattened, parameters_in, with_namespace
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.layouts import START, Layouts


class ClientStarts:
    """`start` is the row that all clients share; `kept`, by client, what each keeps for itself."""

    def __init__(
        self,
        layouts: Layouts,
        request: TrainRequest,
        start: Tensor,
        kept: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self._layouts, self.method, self._start, self._kept = layouts, request.method, start, kept
        self.held: dict[int, Tensor] = {}  # of clients that train now: what they only read
        self._nothing = start[:0]
        self._row = layouts.trained.views(start)

    @cached_property
    def common(self) -> dict[str, Tensor]:
        """The parameters of the shared row."""
        return parameters_in(self._row)

    def begin(self, client: int) -> Tensor:
        """(width,) what the client trains; what it only reads goes into `held`."""
        kept = self._kept[client]
        if not kept and not self.method.client_state and not self.method.evaluates_start():
            self.held[client] = self._nothing
            return self._start
        model = {**self.common, **parameters_in(kept)}
        trained = {name: model[name] for name in self._layouts.names}
        own = flattened(self.method.start(trained, by_namespace(kept)))
        began = {with_namespace(START, name): value for name, value in model.items()}
        held = self._layouts.held
        unset = held.views(self._start.new_zeros(held.width))  # what is known only once the client begins
        self.held[client] = held.flatten({**unset, **own, **began})
        return self._layouts.trained.flatten({**self._row, **model, **own})

    def replace(self, client: int, row: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """The client's row, and what it holds, with these arrays in place of those it began with."""
        held, trained = self._layouts.held, self._layouts.trained
        self.held[client] = held.flatten({**held.views(self.held[client]), **own})
        return trained.flatten({**trained.views(row), **own})
