"""The messages of one round's train requests: clients that lack the same arrays share their content."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from flwr.app import Message
from torch import Tensor

from fedfrozen_app.core.digests import digests
from fedfrozen_app.exchange.broadcast import coded_name
from fedfrozen_app.exchange.count import Traffic, bytes_by_role
from fedfrozen_app.exchange.masking_messages import with_envelopes
from fedfrozen_app.exchange.messages import message_to, train_content, train_message
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.secure.layout import SumLayout
from fedfrozen_app.server.connection import Connection


@dataclass(frozen=True)
class ToMask:
    """A masked client's work: its cohort's request, its neighbours' shares, and its reply's layout."""

    request: TrainRequest
    envelopes: str
    layout: SumLayout


class ClientRequest(NamedTuple):
    """One client's request, and all arrays that may have to be sent with it."""

    client: str
    node: int
    request: TrainRequest
    model: Mapping[str, Tensor]
    masked: ToMask | None = None

    @property
    def envelopes(self) -> str:
        return "" if self.masked is None else self.masked.envelopes

    @property
    def layout(self) -> SumLayout | None:
        return None if self.masked is None else self.masked.layout


class Template(NamedTuple):
    """A message that is copied for every client that lacks the same arrays."""

    message: Message
    by_role: Counter[str]
    text_bytes: int


@dataclass
class RequestMessages:
    connection: Connection
    traffic: Traffic
    _templates: dict[tuple[Any, ...], Template] = field(default_factory=dict)

    def missing(self, to: ClientRequest) -> list[str]:
        """The arrays of the request's base that the client has not confirmed."""
        return self.connection.membership.ledger.missing(to.client, to.request.base)

    def make(self, to: ClientRequest, names: list[str], *, lacking: bool = False) -> Message:
        """A message with the request and these arrays. `lacking`: these complement an earlier message."""
        template = self._template(to, names, {} if lacking else self._codes(to, names))
        text_bytes = template.text_bytes + len(to.envelopes.encode())
        cold = self._cold_bytes(to, names, lacking=lacking)
        self.traffic.sent(to.client, template.by_role, text_bytes, cold)
        message = message_to(to.node, template.message)
        if to.envelopes:
            message.content = with_envelopes(message.content, to.envelopes)
        return message

    def _cold_bytes(self, to: ClientRequest, names: list[str], *, lacking: bool) -> int | None:
        """Bytes of this message's arrays for a client without a cache from earlier runs."""
        ledger = self.connection.membership.ledger
        if ledger.is_cold(to.client):
            return None
        cold = ledger.missing_cold(to.client, to.request.base)
        if lacking:  # a cold client got the others with the earlier message
            cold = [name for name in names if name not in {*cold}]
        held, sizes = (
            frozenset() if lacking else ledger.confirmed(to.client),
            self.connection.broadcast.bytes_of,
        )
        return sum(sizes(name, to.model[name], to.request.base[name], held) for name in cold)

    def _codes(self, to: ClientRequest, names: list[str]) -> dict[str, int]:
        """The number of codes for each array that is sent as codes."""
        broadcast = self.connection.broadcast
        if broadcast.coder is None:
            return {}
        held = self.connection.membership.ledger.held(to.client)
        counts = {name: broadcast.codes_for(name, to.request.base[name], held) for name in names}
        return {name: count for name, count in counts.items() if count}

    def _template(self, to: ClientRequest, names: list[str], codes: Mapping[str, int]) -> Template:
        # Clients that lack the same arrays get the same content, which is never changed.
        key = (to.request.digest, *names, *codes.items())
        if key not in self._templates:
            transport, ticket = self.connection.transport, self.connection.ticket
            broadcast = self.connection.broadcast
            arrays = {name: to.model[name] for name in names}
            coded = {name: value for name, value in arrays.items() if name not in codes}
            coded |= {coded_name(name): broadcast.joined(name, count) for name, count in codes.items()}
            # Within the process the arrays themselves are sent, equal to their decoded values.
            sent = arrays if transport.local else coded
            content = train_content(to.request, sent, local=transport.local, ticket=ticket)
            text = to.request.json + (canonical(ticket) if ticket else "")
            message = train_message(to.node, to.request, content, ttl=transport.lifetime)
            by_role = bytes_by_role(coded, self.connection.roles)
            self._templates[key] = Template(message, by_role, len(text.encode()))
        return self._templates[key]


def with_client_arrays(
    request: TrainRequest, model: Mapping[str, Tensor], arrays: Mapping[str, Tensor] | None
) -> tuple[TrainRequest, Mapping[str, Tensor]]:
    """The request of a client with per-client arrays, and all arrays that may have to be sent with it."""
    if not arrays:
        return request, model
    return replace(request, base={**request.base, **digests(arrays)}), {**model, **arrays}
