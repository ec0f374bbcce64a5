"""The steps of a masked round without arrays: one text to each client, one text back."""

import time
from collections.abc import Mapping, Sequence

from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.exchange.masking_messages import masking_message, masking_text
from fedfrozen_app.server.connection import Connection
from fedfrozen_app.server.transport import with_grace


def exchange_texts(
    connection: Connection,
    server_round: int,
    members: Sequence[tuple[str, int]],
    texts: Mapping[str, str],
    traffic: Traffic,
    patience: float,
) -> list[tuple[str, str | ValueError]]:
    """Each client's answer to its text, or why there is none."""
    deadline, ticket, transport = time.monotonic() + patience, connection.ticket, connection.transport
    messages = [
        masking_message(node, server_round, texts[client], ttl=with_grace(patience), ticket=ticket)
        for client, node in members
    ]
    found: list[tuple[str, str | ValueError]] = []
    for (client, _), message_id in zip(members, transport.send(messages), strict=True):
        message, text = transport.receive(message_id, deadline), texts[client]
        try:
            if message is None:
                raise ValueError(f"did not answer within {patience:g} s")
            answer = masking_text(message)
            traffic.asked(client, text, answer)
            found.append((client, answer))
        except ValueError as error:
            traffic.asked(client, text, "")
            found.append((client, error))
    return found
