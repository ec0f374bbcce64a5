"""Why a site does not carry out a train request of an accepted proposal, before anything trains.

The reasons are for the site's own log: to the server every refusal is the same.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedfrozen_app.adapters.merged_deltas import is_merged_delta
from fedfrozen_app.config import strategy_settings
from fedfrozen_app.config.codec_checks import codec_of
from fedfrozen_app.core import registry
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.exchange.cache import DIGEST
from fedfrozen_app.exchange.names import is_parameter, parameter_of
from fedfrozen_app.exchange.plan import layers_of
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.secure.work import settings_of
from fedfrozen_app.sites.accepted import Accepted
from fedfrozen_app.sites.policy import Policy


def problem_of_request(
    policy: Policy,
    request: TrainRequest,
    run: Accepted,
    roles: Mapping[str, Role],
    examples: int,
    people: int | None,
) -> str | None:
    """None if it may be carried out. It would train on `examples` rows, of `people`."""
    proposal = run.proposal
    return (
        problem_of_method(request, run, roles)
        or problem_of_masking(request, proposal)
        or problem_of_arrays(request, proposal, roles)
        or problem_of_uploads(policy, request, proposal, roles)
        or problem_of_rounds(request, proposal)
        or problem_of_rows(policy, proposal, examples, people)
    )


def problem_of_method(request: TrainRequest, run: Accepted, roles: Mapping[str, Role]) -> str | None:
    """Algorithm, choice of layers and codec follow from the proposal."""
    strategy = registry.find("strategies", run.proposal.strategy["name"])
    settings = strategy_settings(run.config)
    if request.algorithm != strategy.algorithm_for(settings):
        return f"the request asks for the algorithm {request.algorithm}, which is not the strategy's"
    choice = None if request.evaluate else strategy.choice_for(settings, roles)
    codec = None if request.evaluate else strategy.codec_for(settings) or codec_of(run.config.codec)
    epochs = tuple(phase.epochs for phase in request.plan.phases)
    if epochs and epochs not in strategy.phase_epochs(settings):
        return "the request trains in phases that its strategy does not have"
    if not same(request.settings, strategy.client_settings(settings, run.config.client)):
        return f"the request gives the algorithm {request.algorithm} other settings than the proposal"
    if not same(request.choice and asdict(request.choice), choice and asdict(choice)):
        return "the request lets clients choose layers in another way than the proposal"
    if not same(request.codec, codec):
        return "the request has updates encoded in another way than the proposal"
    return None


def problem_of_masking(request: TrainRequest, proposal: Proposal) -> str | None:
    """A request of a masked run is masked, with the proposal's settings and the strategy's weighting."""
    asked, masking = proposal.secure_aggregation, request.masking
    if request.choosing:
        if (asked.name, asked.choices) == ("on", "groups") and request.choice is not None and masking is None:
            return None
        return "the request asks which layers it would choose, and its proposal does not"
    if (masking is not None) != (asked.name == "on"):
        if request.evaluate:
            return "the request asks how a model does on its rows, and of a masked run only sums leave it"
        return "the request asks for an update with masks where the proposal has none, or the other way round"
    if masking is None:
        return None
    if masking.proposal != proposal.hash:  # the others of the sum would have another one's noise
        return "the request sums updates of another proposal than the one that it accepted"
    if not same(masking.settings, settings_of(asked)):
        return "the request has updates masked in another way than the proposal"
    if masking.clip is not None and (not asked.renews or masking.clip > asked.clip):
        return "the request has updates clipped in another way than the proposal"
    strategy = registry.find("strategies", proposal.strategy["name"])
    if tuple(masking.equal) != tuple(strategy.equal):
        return "the request counts clients in another way than the strategy"
    return None


def problem_of_arrays(request: TrainRequest, proposal: Proposal, roles: Mapping[str, Role]) -> str | None:
    """The request names arrays of the run's model, each for what the proposal lets it be."""
    names = {*request.plan.trained, *request.plan.shared, *request.plan.private}
    merged_deltas = set(filter(is_merged_delta, request.base))
    if merged_deltas and proposal.adapter.name == "none":
        return "the request adds something to weights that the proposal leaves as they are"
    names |= {
        name
        for name in request.base
        if name not in merged_deltas and not belongs(name, request.method.from_server)
    }
    names |= set(map(parameter_of, merged_deltas))
    if unknown := sorted(names - set(roles)):
        return f"the request names {unknown[0]}, which the run's model does not have"
    if leaves_choice(request, proposal, roles):
        return "the request leaves it a choice of layers, and all of a group send the same"
    extended = {
        parameter_of(name) for name in request.base if not is_parameter(name) and name not in merged_deltas
    }
    if strange := sorted(extended - set(request.plan.trained)):
        return f"the request brings an array beside {strange[0]}, which does not train"
    if taken := request.private_names_in_base:
        return f"the request sets {taken[0]}, which the site trains itself"
    if not all(DIGEST.fullmatch(digest) for digest in request.base.values()):
        return "the request names an array by something that is no digest"
    return None


def problem_of_uploads(
    policy: Policy, request: TrainRequest, proposal: Proposal, roles: Mapping[str, Role]
) -> str | None:
    """Only parameters of allowed roles leave, and metrics only where the policy sends them."""
    kinds = {roles[name].word for name in request.plan.shared}
    if refused := sorted(kinds - set(policy.upload_roles)):
        return f"the request asks for {refused[0]} parameters, which may not leave it"
    if refused := sorted(kinds - set(proposal.run.roles)):
        return f"the request asks for {refused[0]} parameters, of which its proposal says nothing"
    if request.evaluate and request.plan.shared:
        return "the request asks for an evaluation and for parameters at once"
    if request.evaluate and not policy.sends_metrics:
        return "the request asks how a model does on its rows, and such figures do not leave it"
    return None


def problem_of_rounds(request: TrainRequest, proposal: Proposal) -> str | None:
    rounds = proposal.run.num_rounds
    last = rounds + request.evaluate  # the model after the last round is evaluated too
    if type(request.round) is not int or not 1 <= request.round <= last:  # 1.5 would count as another round
        return f"the request is for round {request.round} of {rounds}"
    if not all(type(n) is int and 1 <= n <= rounds for n in request.participations.values()):
        return f"the request counts participations outside 1 to {rounds}, the rounds of its run"
    return None


def problem_of_rows(policy: Policy, proposal: Proposal, examples: int, people: int | None) -> str | None:
    """An update from a few rows, or from rows of a few people, would reveal too much about them."""
    client = proposal.client
    if client.local_steps is not None:
        examples = min(examples, client.local_steps * client.batch_size)
        people = None if people is None else min(people, examples)
    if examples < policy.min_examples:
        return f"it would train on fewer than {counted(policy.min_examples, 'example')}"
    if policy.min_people and people is None:
        return "its view does not say whose rows they are (unit: patient), so min_people cannot be kept"
    if people is not None and people < policy.min_people:
        return f"it would train on rows of fewer than {policy.min_people} people"
    return None


def leaves_choice(request: TrainRequest, proposal: Proposal, roles: Mapping[str, Role]) -> bool:
    """Whether sites of one sum might send different layers, although its proposal has groups that do not.
    The sum of a layer that only one site sends would be that site's update."""
    if request.masking is None or request.chooser is None or proposal.secure_aggregation.choices != "groups":
        return False
    return len(layers_of(request.plan.trained, roles)) != request.chooser.top_k


def same(found: Any, expected: Any) -> bool:
    """Whether these are the same values in JSON, the format of a request."""
    return json.loads(json.dumps(found)) == json.loads(json.dumps(expected))


def belongs(name: str, namespaces: tuple[str, ...]) -> bool:
    """Whether this is an array that the algorithm takes from the server."""
    return name.rpartition("/")[0] in namespaces
