"""From a train request to its masked vector: which parts of a reply enter the sum, and where."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.config import SecureAggregationConfig
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.names import is_parameter, parameter_of
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.models.roles import Role
from fedfrozen_app.privacy.discrete import LEAST, REACH, Words, discrete_gaussian
from fedfrozen_app.privacy.keystream import Keystream
from fedfrozen_app.privacy.steps import COUNT_NOISE, NOISE, SENSITIVITY
from fedfrozen_app.secure import client
from fedfrozen_app.secure.bounds import least_honest
from fedfrozen_app.secure.client import Session
from fedfrozen_app.secure.layout import FIXED, FRACTION, WITHIN, Arithmetic, SumLayout, encode
from fedfrozen_app.secure.roster import ProtocolError, Roster, Terms
from fedfrozen_app.secure.vector import WIDE, Vector, signed_word, unpacked

MASKED = "masked"  # the one array of a masked reply, and the role under which its head is counted
MARGIN = 0.25  # share of the integers' range that is left for noise
ADDED = ("rotate", "renew", "quantile")
PUBLIC = ("epsilon", "delta")  # metrics that depend on settings and not on rows: not summed


def settings_of(secure: SecureAggregationConfig) -> dict[str, Any]:
    """The settings in a masked request. Settings that only small rings have are included only if they are
    set."""
    found = {key: value for key, value in asdict(secure).items() if key != "name"}
    if secure.quantile is None:
        del found["quantile_share"]
    return {key: value for key, value in found.items() if key not in ADDED or value}


def terms_of(request: TrainRequest) -> Terms:
    assert request.masking is not None
    own = (request.masking.settings[key] for key in ("threshold", "neighbours"))
    return Terms(request.masking.session, request.digest, request.round, *own)


def layout_of(request: TrainRequest, model: Mapping[str, Tensor]) -> SumLayout:
    assert request.masking is not None
    names = request.sent_names
    return SumLayout(
        {name: model[parameter_of(name)].shape for name in names},
        request.masking.figures,
        request.masking.equal,
        chosen=request.choice is not None and request.masking.settings["choices"] == "union",
        bare=noised(request),  # only what the noise protects
        counted=counted(request),
    )


def counted(request: TrainRequest) -> bool:
    """Whether the sum counts the clients whose updates stay within its bound."""
    return request.masking is not None and request.masking.settings.get("quantile") is not None


def noised(request: TrainRequest) -> bool:
    """Whether each client adds a share of the noise before it masks."""
    return request.masking is not None and request.masking.settings["noise"] == "sum"


def rules_of(request: TrainRequest, cohort: int) -> Arithmetic:
    assert request.masking is not None
    settings = request.masking.settings
    words = {key: settings[key] for key in ("bits", "clip", "state_clip", "max_examples")}
    if request.masking.clip is not None:
        words["clip"] = request.masking.clip
    margin, rotate = MARGIN if noised(request) else 0.0, bool(settings.get("rotate", False))
    return Arithmetic(**words, cohort=cohort, margin=margin, rotate=rotate)


def updates_of(
    request: TrainRequest, arrays: Mapping[str, Tensor], base: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Differences of parameters, clipped together to the request's largest norm; other arrays as they are.
    Arrays may be on a GPU and their base on the CPU."""
    assert request.masking is not None
    found = {
        name: value - base[name].to(value.device) if is_parameter(name) else value
        for name, value in arrays.items()
    }
    most, own = request.masking.settings["max_norm"], [name for name in found if is_parameter(name)]
    if most is not None and own:
        norm = torch.linalg.vector_norm(torch.stack([found[name].double().norm() for name in own]))
        if norm > most:
            found |= {name: found[name] * (most / norm).to(found[name]) for name in own}
    return found


def encoded(
    roster: Roster,
    request: TrainRequest,
    reply: Reply,
    base: Mapping[str, Tensor],
    drawn: np.random.Generator,
    words: Words | None = None,
) -> Vector:
    """The reply as a vector, with this client's share of the noise if the request has noise in the sum.

    `drawn` is for rounding, which is no secret; `words` for noise, which is secret except in simulations.
    """
    layout, rules = layout_of(request, base), rules_of(request, len(roster.entries))
    updates = updates_of(request, reply.arrays, base)
    if strange := set(updates) - set(layout.shapes):
        raise ProtocolError(f"the reply holds {min(strange)}, which the request does not share")
    try:
        vector = encode(layout, rules, updates, reply.examples, reply.metrics, drawn)
    except ValueError as error:
        raise ProtocolError(f"its update {error}") from error
    if noised(request):
        add_noise(vector, rules, carriers_of(request, roster), reply.metrics, words or Keystream().words)
    return vector


def masked(
    session: Session, request: TrainRequest, vector: Vector, metrics: Mapping[str, float]
) -> tuple[Session, Reply]:
    """Mask this vector in place, for this session only."""
    session = client.mask(session, vector)
    return session, Reply(request.digest, 0, {MASKED: _packed(request, vector)}, _public(metrics))


def noised_reply(
    roster: Roster,
    request: TrainRequest,
    reply: Reply,
    base: Mapping[str, Tensor],
    drawn: np.random.Generator,
) -> Reply:
    """With noise in the sum, what a site may store of its reply: the noised vector, before masks."""
    vector = encoded(roster, request, reply, base, drawn)
    return Reply(
        reply.request, 0, {noised_name(request, roster): _packed(request, vector)}, _public(reply.metrics)
    )


def noised_vector(roster: Roster, request: TrainRequest, reply: Reply) -> Vector:
    """The vector of a reply made by `noised_reply`."""
    assert request.masking is not None
    data = reply.arrays[noised_name(request, roster)].numpy()
    head = FIXED + counted(request)  # a noised layout is bare
    found = unpacked(data, head, request.masking.settings["bits"])
    return Vector(found.head.copy(), found.body.copy())


def noised_name(request: TrainRequest, roster: Roster) -> str:
    """Scale and noise depend on the size of the cohort and on how many clients carry the noise: a vector made
    for one cohort does not fit another size."""
    return f"noised-{len(roster.entries)}-{roster.needed}-{carriers_of(request, roster)}"


def carriers_of(request: TrainRequest, roster: Roster) -> int:
    """The fewest honest clients in a sum of this round: as few as may remain, less the colluders among them,
    who know their own shares of the noise. Their shares add up to the full noise."""
    cohort, threshold = len(roster.entries), roster.terms.threshold
    return least_honest(cohort, roster.colluders, roster.degree, threshold, survivors_of(request, roster))


def survivors_of(request: TrainRequest, roster: Roster) -> int:
    """The fewest clients in a sum of this round: no client confirms a smaller one."""
    assert request.masking is not None
    return max(roster.needed, min(request.masking.settings["min_cohort"], len(roster.entries)))


def _packed(request: TrainRequest, vector: Vector) -> Tensor:
    assert request.masking is not None
    return torch.from_numpy(vector.packed(request.masking.settings["bits"]))


def _public(metrics: Mapping[str, float]) -> dict[str, float]:
    return {key: metrics[key] for key in PUBLIC if key in metrics}


def add_noise(
    vector: Vector, rules: Arithmetic, carriers: int, metrics: Mapping[str, float], words: Words
) -> None:
    """Add this client's share: any `carriers` shares add up to the full noise. One unit can change the count
    of clients within the bound by one, and the count's noise is calibrated to that."""
    share = noise_share(len(vector.body), rules, carriers, metrics)
    word = vector.body.dtype
    vector.body += discrete_gaussian(len(vector.body), share, words).astype(signed_word(word)).view(word)
    if len(vector.head) > WITHIN:
        std = metrics[COUNT_NOISE] * FRACTION / math.sqrt(carriers)
        vector.head[WITHIN:] += discrete_gaussian(1, std, words).view(vector.head.dtype)


def problem_of_noise(
    request: TrainRequest,
    model: Mapping[str, Tensor],
    cohort: int,
    carriers: int,
    metrics: Mapping[str, float],
) -> str | None:
    """Why this client's share of the noise cannot be added; checked before training."""
    try:
        noise_share(layout_of(request, model).body, rules_of(request, cohort), carriers, metrics)
    except ProtocolError as no:
        return str(no)
    return None


def noise_share(size: int, rules: Arithmetic, carriers: int, metrics: Mapping[str, float]) -> float:
    """The standard deviation of one client's share, in units of the body; `ProtocolError` if it does not fit.

    Adding or removing one unit (an example, a person) can change the rounding of each of the d numbers by
    less than one: √d.
    """
    if not {NOISE, SENSITIVITY} <= set(metrics):
        raise ProtocolError("its update comes without what its noise is to be")
    whole = metrics[NOISE] * (metrics[SENSITIVITY] * rules.scale("", ()) + math.sqrt(size))
    share = whole / math.sqrt(carriers)
    if share < LEAST:
        raise ProtocolError(
            "the numbers are too coarse for its noise: raise bits, or lower clip or max_examples"
        )
    if REACH * share * math.sqrt(rules.cohort) > MARGIN * 2 ** (rules.bits - 1):
        raise ProtocolError("the noise would not fit into the numbers: raise bits, clip or max_examples")
    return share


def problem_of_masked(reply: Reply, request: TrainRequest, layout: SumLayout) -> str | None:
    """Why a masked reply is rejected, as the rest of a sentence; its content cannot be checked."""
    assert request.masking is not None
    if reply.request != request.digest:
        return "answers another request than this round's"
    if set(reply.metrics) - set(PUBLIC) or ("epsilon" in reply.metrics) != ("delta" in reply.metrics):
        return "tells figures beside its masked update"
    vector = reply.arrays.get(MASKED)
    if set(reply.arrays) != {MASKED} or vector is None or vector.dtype != torch.uint8:
        return "sent no masked update"
    size = layout.bytes(request.masking.settings["bits"])
    if vector.shape != (size,):
        return f"sent {vector.numel()} masked bytes where {size} were asked for"
    return None


def bytes_by_role(layout: SumLayout, bits: int, roles: Mapping[str, Role]) -> Counter[str]:
    """The bytes of a masked reply by role; its head is counted under a name of its own."""
    found: Counter[str] = Counter({MASKED: layout.head * WIDE.itemsize})
    start = 0
    for name, size in layout.sizes.items():  # a byte that spans two arrays counts for the first
        end = start + size
        found[roles[parameter_of(name)].kind] += -(-end * bits // 8) - -(-start * bits // 8)
        start = end
    return found
