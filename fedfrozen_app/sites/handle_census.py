"""Census requests: the site counts its rows, within what its policy allows."""

import hashlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Message

from fedfrozen_app.census.ask import Ask, read_ask
from fedfrozen_app.census.measure import Tokens
from fedfrozen_app.census.memory import read_memory, write_memory
from fedfrozen_app.census.overlap import problem_of_overlap
from fedfrozen_app.census.record_source import records_of_folder, tokens_of_model
from fedfrozen_app.census.records import Records
from fedfrozen_app.census.site import Rules, released_counts
from fedfrozen_app.census.site import problem as problem_of_ask
from fedfrozen_app.exchange.census_messages import CensusReply, census_reply, census_text
from fedfrozen_app.exchange.hello_messages import WAITING
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.refusals import RequestRefused
from fedfrozen_app.sites.site_budget import Price
from fedfrozen_app.sites.site_state import Incoming, SiteState
from fedfrozen_app.sites.views import View


def handle_census(site: SiteState, incoming: Incoming) -> Message:
    message, policy, details = incoming.message, incoming.policy, incoming.details
    try:
        ask = read_ask(census_text(message))
    except ValueError as error:
        raise RequestRefused(f"the census cannot be read: {error}") from None
    details |= {"run": ask.id, "proposal": ask.hash}
    view = site.view(ask.view)
    rules = policy.census_rules(site.kit.match_key)
    if problem := policy.problem_of_census(ask, view, incoming.bundle) or problem_of_ask(ask, rules):
        raise RequestRefused(problem)
    if site.is_waiting(ask.hash, policy.census):
        if not site.approvals.has(ask.hash):
            site.check_limit("hellos", policy.hellos_per_day, "hello", "pending")
            site.approvals.ask(ask)
            site.audit.write("pending", **details, view=view.name, epsilon_asked=ask.epsilon)
        return census_answer(site, message, WAITING)
    site.check_limit("censuses", policy.censuses_per_day, "census")
    text, charged = count(site, ask, view, rules, policy)
    epsilon, delta = site.budget.spent()
    site.audit.write(
        "census",
        **details,
        view=view.name,
        columns=sorted(ask.columns),
        floor=rules.floor,
        hashes=ask.matches,
        bytes=len(text.encode()),
        answer=hashlib.sha256(text.encode()).hexdigest(),
        epsilon=ask.epsilon,
        charged=charged,
        epsilon_all_runs=epsilon,
        delta_all_runs=delta,
    )
    return census_answer(site, message, "", text)


def count(site: SiteState, ask: Ask, view: View, rules: Rules, policy: Policy) -> tuple[str, str | None]:
    """Returns the answer's text and the budget entry that its epsilon was charged to."""
    place = site.kit.var / "census" / f"{view.name}.json"
    memory = read_memory(place)
    if ask.epsilon is None:
        before, records = deepcopy(memory), records_of_view(view)
        text = canonical(released_counts(ask, records, rules, memory, tokens_of_site(site)))
        if problem := problem_of_overlap(before, memory, records.names, other_memories(place), rules.floor):
            raise RequestRefused(problem)
        write_memory(place, memory)
        return text, None

    def draw() -> str:
        return canonical(released_counts(ask, records_of_view(view), rules, {}, tokens_of_site(site)))

    return answer_once(site, policy, Price(ask.epsilon, 0.0, view.unit, ask.hash), place, draw)


def answer_once(
    site: SiteState, policy: Policy, price: Price, place: Path, draw: Callable[[], str], kind: str = "census"
) -> tuple[str, str]:
    """A noisy answer: drawn and charged once for each ask, then stored."""
    memory = read_memory(place)
    kept = memory.setdefault("noised", {})
    if charges := charges_for(site, price.proposal):
        return answer_again(kept, charges, place)
    charged = f"{kind}-{price.proposal[:32]}"
    if problem := site.budget.problem(charged, price, policy.max_epsilon, policy.max_delta):
        raise RequestRefused(problem)
    kept[charged] = draw()
    site.budget.charge(charged, price, 1, price.proposal, site.audit.head)
    write_memory(place, memory)
    return kept[charged], charged


def other_memories(place: Path) -> dict[str, dict[str, Any]]:
    """The records of what was released about the site's other views, by name."""
    return {path.stem: read_memory(path) for path in sorted(place.parent.glob("*.json")) if path != place}


def charges_for(site: SiteState, ask: str) -> list[str]:
    """The budget entries of the ask with this hash, oldest first. This reads no rows: if changed rows caused
    a new draw, a changed answer would reveal the change outside the epsilon guarantee.

    Earlier versions charged an ask again when rows had changed, under other names.
    """
    return list(dict.fromkeys([*site.budget.runs_of(ask), *site.audit.charges.get(ask, ())]))


def answer_again(kept: Mapping[str, str], charges: list[str], place: Path) -> tuple[str, str]:
    """Repeat the last charged answer, at no cost. A lost one is not drawn again: averaging many draws would
    remove the noise."""
    for charged in reversed(charges):
        if charged in kept:
            return kept[charged], charged
    raise RequestRefused(
        f"this was charged as {charges[-1]}, and {place} does not hold its answer: bring the file "
        "back from a backup, or let the server ask under another run_id, which is charged again"
    )


def records_of_view(view: View) -> Records:
    # The view's own unit column: a dataset reader may have another, or none.
    return records_of_folder(replace(view.dataset(), unit_column=view.column), None, view.classes or ())


def tokens_of_site(site: SiteState) -> Tokens | None:
    return None if site.kit.model_path is None else tokens_of_model(site.kit.model_path)


def census_answer(site: SiteState, message: Message, state: str, text: str = "") -> Message:
    return census_reply(message, CensusReply(site.kit.name, state, text, site.audit.head))
