"""A site's side of a masked study: the sums that may leave without masks, masked.

The rules are the same as without masks: floors, edges and the memory of earlier answers apply to the masked
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fedfrozen_app.secure import client, secagg_messages
from fedfrozen_app.secure.client import Session
from fedfrozen_app.secure.roster import ProtocolError
from fedfrozen_app.study.masked_numbers import flat_counts, flat_sums, vector_of
from fedfrozen_app.study.masked_steps import MaskedStep, digest_of, shown_text, vector_text
from fedfrozen_app.study.site_sums import SiteCounts, read_answer
from fedfrozen_app.study.study_ask import COUNTS, Step, StudyAsk

Plain = Callable[[StudyAsk, Step], str]  # the answer without masks


def plain_ask(ask: StudyAsk, times: tuple[float, ...] | None = None) -> StudyAsk:
    """The same study without masks, counted only at these times."""
    if times is None:
        return replace(ask, masks=None)
    return replace(ask, masks=None, edges=((ask.edges or (0.0,))[0], *times))


def shown_answer(ask: StudyAsk, plain: Plain) -> str:
    """The edges at which the counts may be shown; no count leaves."""
    found = _read(plain, plain_ask(ask), Step())
    assert isinstance(found, SiteCounts)
    times = None if found.tables is None else found.tables[0]["events"]["times"]
    return shown_text(found.floor, times, found.moments is not None)


def masked_answer(
    ask: StudyAsk, step: MaskedStep, session: Session | None, plain: Plain
) -> tuple[Session, str]:
    """Returns the masked sum and the session after it; `ProtocolError` if it breaks the protocol."""
    assert step.sum is not None
    opened = opened_session(ask, step, session)
    if step.sum.name == COUNTS:
        found = _read(plain, plain_ask(ask, step.sum.times), Step())
        assert isinstance(found, SiteCounts)
        _check_whole(found, ask, step.sum)
        vector = vector_of(flat_counts(found, ask))
    else:
        vector = vector_of(flat_sums(_read(plain, plain_ask(ask), step.sum)))
    return client.mask(opened, vector), vector_text(vector)


def opened_session(ask: StudyAsk, step: MaskedStep, session: Session | None) -> Session:
    """The session with the received envelopes; its keys must have been signed for this sum."""
    if session is None or step.session != session.terms.session:
        raise ProtocolError("the sum is of a session that it has not begun, or has ended")
    if step.sum is None or session.terms.request != digest_of(ask, step.sum):
        raise ProtocolError("the sum is not the one that its keys were signed for")
    return client.open_envelopes(session, step.envelopes or {}, step.present)


def check_terms(question: Mapping[str, Any], ask: StudyAsk) -> None:
    """The terms of new keys must be those of the ask."""
    if question["step"] != "keys" or ask.masks is None:
        return
    terms = secagg_messages.read_terms(question["terms"])
    if (terms.threshold, terms.neighbours) != (ask.masks.threshold, ask.masks.neighbours):
        raise ProtocolError("its terms are not those of the study")


def _read(plain: Plain, ask: StudyAsk, step: Step) -> Any:
    return read_answer(plain(ask, step), ask, step)


def _check_whole(found: SiteCounts, ask: StudyAsk, step: Step) -> None:
    """A site masks only what it may release unmasked: no counts of too few people, or at edges that it
    joins."""
    if found.tables is None or (ask.columns.covariates and found.moments is None):
        raise ProtocolError("its counts do not leave it")
    if any(pair[status]["times"] != list(step.times) for pair in found.tables for status in pair):
        raise ProtocolError("its counts are joined over other edges")
