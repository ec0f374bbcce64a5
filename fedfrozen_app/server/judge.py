"""A round in which nothing is learned: every client judges what it has on its own test rows."""

import logging
from dataclasses import replace

from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.server.base import PlannedFedAvg
from fedfrozen_app.server.carried import add_to, follow
from fedfrozen_app.server.sampling import draw_cohort

log = logging.getLogger(__name__)


def evaluate_clients(
    strategy: PlannedFedAvg, after_round: int
) -> tuple[dict[str, dict[str, float]], dict[str, str], Traffic]:
    """Every client's figures on its own test rows, with the newest shared arrays; why others have none."""
    order = strategy.order(after_round + 1, {})
    order, arrays = add_to(order, strategy.model, follow(strategy.carried, order, strategy.model))
    plan = replace(strategy.afterwards(after_round + 1), shared=())
    order = replace(order, plan=plan, judge=True, codec=None, choice=None)
    conversation, traffic = strategy.federation.conversation, Traffic()
    nodes = conversation.greet()
    members = [(client, nodes[client]) for client in draw_cohort(nodes, 1.0, strategy.federation.seed, 0)]
    found, failed = {}, {}
    for client, reply in conversation.round(order, members, arrays, traffic):
        if isinstance(reply, str):
            failed[client] = reply
            log.warning("Client %s could not be judged: it %s.", client, reply)
        else:
            found[client] = dict(strategy.judged(reply.metrics))
    return found, failed, traffic
