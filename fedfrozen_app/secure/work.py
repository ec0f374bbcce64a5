"""From an order to its vector: which numbers of a reply enter the sum, and where they lie."""

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.names import is_parameter, parameter_of
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.models.roles import Role
from fedfrozen_app.privacy.discrete import LEAST, REACH, Words, discrete_gaussian
from fedfrozen_app.privacy.keystream import Keystream
from fedfrozen_app.secure import client
from fedfrozen_app.secure.client import Session
from fedfrozen_app.secure.layout import Arithmetic, Layout, encode
from fedfrozen_app.secure.roster import Refused, Terms
from fedfrozen_app.secure.vector import WIDE, Vector

MASKED = "masked"  # the one array of a masked reply, and the line under which its head is counted
# How much noise a client owes the sum, and what one of its units can change in it: they stay with the client.
NOISE, SENSITIVITY = "noise_multiplier", "sensitivity"
MARGIN = 0.25  # of the numbers' range, for noise
PUBLIC = ("epsilon", "delta")  # figures that come from settings and not from rows: they are in no sum


def terms_of(order: Order) -> Terms:
    assert order.masking is not None
    settings = order.masking.settings
    return Terms(order.masking.session, order.digest, settings["threshold"], settings["neighbours"])


def layout_of(order: Order, model: Mapping[str, Tensor]) -> Layout:
    assert order.masking is not None
    names = order.sent_names
    return Layout(
        {name: model[parameter_of(name)].shape for name in names},
        order.masking.figures,
        order.masking.equal,
        chosen=order.choice is not None and order.masking.settings["choices"] == "union",
        bare=noised(order),  # nothing but what noise covers
    )


def noised(order: Order) -> bool:
    """Whether clients add noise in shares to what they mask."""
    return order.masking is not None and order.masking.settings["noise"] == "sum"


def rules_of(order: Order, cohort: int) -> Arithmetic:
    assert order.masking is not None
    settings = order.masking.settings
    words = {key: settings[key] for key in ("bits", "clip", "state_clip", "max_examples")}
    return Arithmetic(**words, cohort=cohort, margin=MARGIN if noised(order) else 0.0)


def updates_of(order: Order, arrays: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Differences of parameters, other arrays as they are; together within the order's largest norm. Arrays
    may lie on a GPU and their base beside it."""
    assert order.masking is not None
    found = {
        name: value - base[name].to(value.device) if is_parameter(name) else value
        for name, value in arrays.items()
    }
    most, own = order.masking.settings["max_norm"], [name for name in found if is_parameter(name)]
    if most is not None and own:
        norm = torch.linalg.vector_norm(torch.stack([found[name].double().norm() for name in own]))
        if norm > most:
            found |= {name: found[name] * (most / norm).to(found[name]) for name in own}
    return found


def masked_reply(
    session: Session,
    order: Order,
    reply: Reply,
    base: Mapping[str, Tensor],
    drawn: np.random.Generator,
    words: Words | None = None,
) -> tuple[Session, Reply]:
    """What leaves a client in place of its reply; `session` holds its neighbours' shares already.

    `drawn` is for rounding, which is no secret; `words` for noise, which is, unless nobody shall be fooled.
    """
    assert order.masking is not None
    layout, rules = layout_of(order, base), rules_of(order, len(session.roster.entries))
    updates = updates_of(order, reply.arrays, base)
    if strange := set(updates) - set(layout.shapes):
        raise Refused(f"the reply holds {min(strange)}, which the order does not share")
    try:
        vector = encode(layout, rules, updates, reply.examples, reply.metrics, drawn)
    except ValueError as error:
        raise Refused(f"its update {error}") from error
    if noised(order):
        add_noise(vector, rules, session.roster.needed, reply.metrics, words or Keystream().words)
    session = client.mask(session, vector)
    packed = torch.from_numpy(vector.packed(rules.bits))
    metrics = {key: reply.metrics[key] for key in PUBLIC if key in reply.metrics}
    return session, Reply(order.digest, 0, {MASKED: packed}, metrics)


def add_noise(
    vector: Vector, rules: Arithmetic, needed: int, metrics: Mapping[str, float], words: Words
) -> None:
    """This client's share: any `needed` of them together are the whole noise.

    Rounding may move each of the d numbers by less than one more or less where one unit comes or goes: √d.
    """
    if NOISE not in metrics or SENSITIVITY not in metrics:
        raise Refused("its update comes without what its noise is to be")
    whole = metrics[NOISE] * (metrics[SENSITIVITY] * rules.scale("", ()) + math.sqrt(len(vector.body)))
    share = whole / math.sqrt(needed)
    if share < LEAST:
        raise Refused("the numbers are too coarse for its noise: raise bits, or lower clip or max_examples")
    if REACH * share * math.sqrt(rules.cohort) > MARGIN * 2 ** (rules.bits - 1):
        raise Refused("the noise would not fit into the numbers: raise bits, clip or max_examples")
    vector.body += discrete_gaussian(len(vector.body), share, words).astype(np.int32).view(np.uint32)


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
