"""Weights that each side loads for itself, such as a pretrained base, and clients with other ones."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedfrozen_app.core.digests import digests
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.train_request import TrainRequest


@dataclass
class Foundation:
    arrays: Callable[[], Mapping[str, Tensor]] = dict  # the server's values
    clients: set[str] = field(default_factory=set)  # clients with other weights: their requests include these
    _digests: dict[str, str] = field(default_factory=dict)  # cached: they do not change

    @property
    def digests(self) -> Collection[str]:
        """Digests of these weights, once they were sent to a client."""
        return self._digests.values()

    def by_digest(self) -> Mapping[str, Tensor]:
        arrays = self.arrays()
        self._digests = self._digests or digests(arrays)
        return {self._digests[name]: value for name, value in arrays.items()}

    def add_to(
        self, request: TrainRequest, model: Mapping[str, Tensor]
    ) -> tuple[TrainRequest, Mapping[str, Tensor]]:
        """The request with these weights in its base, and all arrays that may have to be sent."""
        arrays = self.arrays()
        self._digests = self._digests or digests(arrays)
        return replace(request, base={**self._digests, **request.base}), {**arrays, **model}

    def is_asked_for(self, reply: Reply | str, request: TrainRequest) -> bool:
        """Whether the client lacks arrays that are not in the request because each side loads them."""
        if isinstance(reply, str) or not reply.lacks or reply.request != request.digest:
            return False
        unnamed = {*reply.lacks} - {*request.base}
        return bool(unnamed) and unnamed <= {*self.arrays()}
