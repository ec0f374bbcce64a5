"""From an order to its vector: which numbers of a reply enter the sum, and where they lie."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.exchange.check import names_shared
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.names import is_parameter, parameter_of
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.models.roles import Role
from fedfrozen_app.secure import client
from fedfrozen_app.secure.client import Session
from fedfrozen_app.secure.layout import Arithmetic, Layout, encode
from fedfrozen_app.secure.masks import WIDE
from fedfrozen_app.secure.roster import Refused, Terms

MASKED = "masked"  # the one array of a masked reply, and the line under which its head is counted
PUBLIC = ("epsilon", "delta")  # figures that come from settings and not from rows: they are in no sum


def terms_of(order: Order) -> Terms:
    assert order.masking is not None
    settings = order.masking.settings
    return Terms(order.masking.session, order.digest, settings["threshold"], settings["neighbours"])


def layout_of(order: Order, model: Mapping[str, Tensor]) -> Layout:
    assert order.masking is not None
    names = names_shared(order, order.plan.shared)
    return Layout(
        {name: model[parameter_of(name)].shape for name in names},
        order.masking.figures,
        order.masking.equal,
        chosen=order.choice is not None,
    )


def rules_of(order: Order, cohort: int) -> Arithmetic:
    assert order.masking is not None
    settings = order.masking.settings
    words = {key: settings[key] for key in ("bits", "clip", "state_clip", "max_examples")}
    return Arithmetic(**words, cohort=cohort)


def updates_of(order: Order, arrays: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Differences of parameters, other arrays as they are; together within the order's largest norm."""
    assert order.masking is not None
    found = {name: value - base[name] if is_parameter(name) else value for name, value in arrays.items()}
    most, own = order.masking.settings["max_norm"], [name for name in found if is_parameter(name)]
    if most is not None and own:
        norm = torch.linalg.vector_norm(torch.stack([found[name].double().norm() for name in own]))
        if norm > most:
            found |= {name: found[name] * (most / norm).to(found[name]) for name in own}
    return found


def masked_reply(
    session: Session, order: Order, reply: Reply, base: Mapping[str, Tensor], drawn: np.random.Generator
) -> tuple[Session, Reply]:
    """What leaves a client in place of its reply; `session` holds its neighbours' shares already."""
    assert order.masking is not None
    layout, rules = layout_of(order, base), rules_of(order, len(session.roster.entries))
    updates = updates_of(order, reply.arrays, base)
    if strange := set(updates) - set(layout.shapes):
        raise Refused(f"the reply holds {min(strange)}, which the order does not share")
    try:
        vector = encode(layout, rules, updates, reply.examples, reply.metrics, drawn)
    except ValueError as error:
        raise Refused(f"its update {error}") from error
    session = client.mask(session, vector)
    packed = torch.frombuffer(bytearray(vector.packed(rules.bits)), dtype=torch.uint8)
    metrics = {key: reply.metrics[key] for key in PUBLIC if key in reply.metrics}
    return session, Reply(order.digest, 0, {MASKED: packed}, metrics)


def problem_of_masked(reply: Reply, order: Order, layout: Layout) -> str | None:
    """Why a masked reply must be set aside, as the rest of a sentence; what is in it nobody can tell."""
    assert order.masking is not None
    if reply.order != order.digest:
        return "answers another order than this round's"
    if set(reply.metrics) - set(PUBLIC) or ("epsilon" in reply.metrics) != ("delta" in reply.metrics):
        return "tells figures beside its masked update"
    vector = reply.arrays.get(MASKED)
    if set(reply.arrays) != {MASKED} or vector is None or vector.dtype != torch.uint8:
        return "sent no masked update"
    size = layout.bytes(order.masking.settings["bits"])
    if vector.shape != (size,):
        return f"sent {vector.numel()} masked bytes where {size} were asked for"
    return None


def bytes_by_role(layout: Layout, bits: int, roles: Mapping[str, Role]) -> Counter[str]:
    """Of a masked reply, as every reply is counted; its head has a line of its own."""
    found: Counter[str] = Counter({MASKED: layout.head * WIDE.itemsize})
    for name, size in layout.sizes.items():
        found[roles[parameter_of(name)].kind] += size * bits // 8
    return found
