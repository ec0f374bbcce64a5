"""A masked survival study at a real site: keys signed by its certificate, and masked sums.

The policy's limits are the same as without masks; each step is in the audit log before its answer leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedfrozen_app.config import SecureAggregationConfig
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.refusals import refusing_what_masks_refuse
from fedfrozen_app.sites.site_state import SiteState
from fedfrozen_app.study.masked_site import Plain, check_terms, masked_answer, shown_answer
from fedfrozen_app.study.masked_steps import EDGES, MaskedStep
from fedfrozen_app.study.study_ask import StudyAsk

MESSAGES = 4  # that carry keys, per sum
EVENT = "survival_masks"


def sum_answer(site: SiteState, ask: StudyAsk, step: MaskedStep, plain: Plain) -> str:
    """The edges at which its counts may be shown, or a masked sum."""
    if step.name == EDGES:
        return shown_answer(ask, plain)
    with refusing_what_masks_refuse():
        session, text = masked_answer(ask, step, site.masks.session(ask.hash), plain)
    site.masks.keep(ask.hash, session)
    return text


def key_answer(
    site: SiteState,
    ask: StudyAsk,
    question: Mapping[str, Any],
    policy: Policy,
    details: Mapping[str, Any],
) -> str:
    """Keys, shares, confirmation or unmasking."""
    assert ask.masks is not None
    most = MESSAGES * policy.survival_answers_per_day
    site.check_limit("messages with keys of survival studies", most, EVENT)
    settings = SecureAggregationConfig(
        name="on",
        min_cohort=ask.masks.min_cohort,
        threshold=ask.masks.threshold,
        neighbours=ask.masks.neighbours,
    )
    with refusing_what_masks_refuse():
        check_terms(question, ask)
        session, text = site.masks.answer_step(ask.hash, question, settings)
    about: dict[str, Any] = {"session": session.terms.session, "sum": session.terms.request}
    if session.survivors:
        about |= {"survivors": list(session.survivors)}
    elif session.drawn:
        about |= {"cohort": list(session.roster.names), "neighbours": list(session.drawn)}
    site.audit.write(EVENT, **{**details, **about})
    site.masks.keep(ask.hash, session)
    return text
