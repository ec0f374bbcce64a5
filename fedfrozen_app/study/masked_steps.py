"""The steps of a masked study: the edges that a site may show, the key exchange, and the masked sum.

    edges    the site sends the edges at which its counts may be shown, and no count
    masks    keys, shares, confirmation and unmasking, as in a masked round of training
    masked   the counts at the edges that all sites show, or one step of a regression, under masks

Keys are signed for one sum: its digest is in their terms.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from fedfrozen_app.exchange.strict import canonical, read_json
from fedfrozen_app.secure import secagg_messages
from fedfrozen_app.secure.roster import bytes_by_name, texts_by_name
from fedfrozen_app.secure.vector import WIDE, Vector, unpacked
from fedfrozen_app.study.study_ask import COUNTS, Step, StudyAsk, read_step

EDGES, MASKS, MASKED = "edges", "masks", "masked"
MOST, DEPTH = 20_000_000, 6
MOST_NUMBERS = 2_000_000


@dataclass(frozen=True)
class MaskedStep:
    name: str
    question: Mapping[str, Any] | None = None  # a question of the masking protocol
    sum: Step | None = None  # what is summed; for counts, its times are the edges that all sites show
    session: str = ""
    envelopes: Mapping[str, bytes] | None = None
    present: Sequence[str] = ()


def edges_text() -> str:
    return canonical({"step": EDGES})


def question_text(question: str) -> str:
    return canonical({"step": MASKS, "question": json.loads(question)})


def sum_text(step: Step) -> str:
    """The text that, with the ask, the keys of this sum are signed for."""
    return canonical({"step": COUNTS, "times": list(step.times)}) if step.name == COUNTS else step.text


def digest_of(ask: StudyAsk, step: Step) -> str:
    return sha256(canonical([ask.hash, sum_text(step)]).encode()).hexdigest()


def masked_text(step: Step, session: str, envelopes: Mapping[str, bytes], present: Sequence[str]) -> str:
    return canonical(
        {
            "step": MASKED,
            "sum": json.loads(sum_text(step)),
            "session": session,
            "envelopes": texts_by_name(envelopes),
            "present": list(present),
        }
    )


def read_masked_step(text: str, ask: StudyAsk) -> MaskedStep:
    """Parse a step; if it is not one of this study, a `ValueError` that completes a sentence."""
    found = read_json(text, most=MOST, depth=DEPTH, longest=MOST)
    if found == {"step": EDGES}:
        return MaskedStep(EDGES)
    if not isinstance(found, dict):
        raise ValueError("the step is none of a masked study")
    if set(found) == {"step", "question"} and found["step"] == MASKS:
        return MaskedStep(MASKS, secagg_messages.read_question(canonical(found["question"])))
    if set(found) != {"step", "sum", "session", "envelopes", "present"} or found["step"] != MASKED:
        raise ValueError("the step has other keys than one of a masked study")
    return MaskedStep(
        MASKED,
        sum=_sum(found["sum"], ask),
        session=str(found["session"]),
        envelopes=bytes_by_name(found["envelopes"]),
        present=secagg_messages.names_of(found["present"], "those that are there"),
    )


def _sum(found: Any, ask: StudyAsk) -> Step:
    if isinstance(found, dict) and found.get("step") == COUNTS:
        times, edges = found.get("times"), ask.edges or ()
        if set(found) != {"step", "times"} or not isinstance(times, list) or not times:
            raise ValueError("the counts have other keys than their times")
        if not set(times) <= set(edges[1:]) or times != sorted(set(times)) or times[-1] != edges[-1]:
            raise ValueError("the counts are at other times than the study's edges")
        return Step(COUNTS, tuple(float(time) for time in times))
    return read_step(canonical(found), ask)


# Answers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """The edges that a site may show, before any count leaves."""

    floor: int
    times: tuple[float, ...] | None  # None if some group has too few people
    regression: bool  # whether it currently provides sums of covariates


def shown_text(floor: int, times: Sequence[float] | None, regression: bool) -> str:
    return canonical(
        {"floor": floor, "times": None if times is None else list(times), "regression": regression}
    )


def read_shown(text: str, ask: StudyAsk) -> Shown:
    found, edges = read_json(text, most=MOST, depth=3, longest=20), ask.edges or ()
    if not isinstance(found, dict) or set(found) != {"floor", "times", "regression"}:
        raise ValueError("has other keys than the edges of a masked study")
    if type(found["floor"]) is not int or found["floor"] < 1 or not isinstance(found["regression"], bool):
        raise ValueError("does not say its floor")
    times = found["times"]
    if times is None:
        return Shown(found["floor"], None, found["regression"])
    sound = isinstance(times, list) and all(type(time) in (int, float) for time in times)
    if (
        not sound
        or times != sorted(set(times))
        or not set(times) <= set(edges[1:])
        or times[-1:] != [edges[-1]]
    ):
        raise ValueError("shows other times than the study's edges")
    return Shown(found["floor"], tuple(float(time) for time in times), found["regression"])


def vector_text(vector: Vector) -> str:
    return canonical({"vector": base64.b64encode(vector.head.tobytes()).decode("ascii")})


def read_vector(text: str, numbers: int) -> Vector:
    """Parse a vector; `ValueError` unless it has this many numbers."""
    found = read_json(text, most=MOST, depth=2, longest=MOST)
    if not isinstance(found, dict) or not isinstance(found.get("vector"), str):
        raise ValueError("sent no masked sum")
    try:
        data = base64.b64decode(found["vector"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("sent a masked sum that cannot be read") from error
    if len(data) != 2 * numbers * WIDE.itemsize:
        raise ValueError("sent a masked sum of another size")
    return unpacked(data, 2 * numbers, 32)
