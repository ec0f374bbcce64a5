"""A round without training: every client evaluates its model on its own test rows."""

import logging
from dataclasses import replace

from fedfrozen_app.core.formatting import quoted
from fedfrozen_app.core.quantiles import LISTED
from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.server.base import PlannedFedAvg
from fedfrozen_app.server.round_trip import RoundTrip
from fedfrozen_app.server.sampling import draw_cohort
from fedfrozen_app.server.server_state import add_to, follow

log = logging.getLogger(__name__)


def evaluate_clients(
    strategy: PlannedFedAvg, after_round: int
) -> tuple[dict[str, dict[str, float]], dict[str, str], Traffic]:
    """Every client's metrics on its own test rows, with the newest shared arrays, and the reasons of
    failures. Of more than `LISTED` clients, a random sample of that size, drawn with the run's seed."""
    request = strategy.request(after_round + 1, {})
    request, arrays = add_to(request, strategy.model, follow(strategy.server_state, request, strategy.model))
    plan = replace(strategy.afterwards(after_round + 1), shared=())
    request = replace(request, plan=plan, evaluate=True, codec=None, choice=None)
    connection, traffic = strategy.federation.connection, Traffic()
    nodes = connection.membership.greet()
    share = min(1.0, LISTED / max(len(nodes), 1))
    if share < 1:
        log.info("%d of %d clients are evaluated, drawn by the seed.", LISTED, len(nodes))
    members = [(client, nodes[client]) for client in draw_cohort(nodes, share, strategy.federation.seed, 0)]
    found, failed = {}, {}
    for client, reply in RoundTrip(connection, request, arrays, traffic).replies(members):
        if isinstance(reply, str):
            failed[client] = quoted(reply)
            log.warning("Client %s could not be evaluated: it %s.", client, failed[client])
        else:
            found[client] = dict(strategy.evaluated(reply.metrics))
    return found, failed, traffic
