"""Clients that choose layers, added up in groups of equal layers: exactly, in fewer bytes, never too few."""

import json

import numpy as np
import pytest
from flwr.app import Error, Message, MessageType
from hypothesis import given
from hypothesis import strategies as st

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.exchange.check import problem_of
from fedfrozen_app.exchange.masking_messages import MASKING, masking_text
from fedfrozen_app.exchange.messages import Reply, read_train
from fedfrozen_app.exchange.plan import Plan, layers_of
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.exchange.train_request import NamedSettings, TrainRequest, read_train_request
from fedfrozen_app.handlers import train_handler
from fedfrozen_app.local.choose import Chosen
from fedfrozen_app.report.console import masked_facts
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.secure import work
from fedfrozen_app.secure.vector import Vector
from fedfrozen_app.server import masked
from fedfrozen_app.server.equal_layers import groups_of
from tests.conftest import same_bits, slowly
from tests.secure.attacks import attack, log, with_roster
from tests.secure.runs import ON, PLAIN, far, last_bits

GROUPS = "secure_aggregation.choices=groups"
# Six clients: three chose layer 0, two layer 1, one layer 3.
CHOICES = {"0": (0,), "1": (1,), "2": (0,), "3": (3,), "4": (1,), "5": (0,)}
EVEN = {"0": (0,), "1": (2,), "2": (0,), "3": (2,), "4": (2,), "5": (0,)}
SAFL = ("strategy=safl", "strategy.top_k=1", "dataset=digits", "model=vit_tiny", "num_clients=6")
WORDS = (*SAFL, "model.config.num_hidden_layers=4", "num_rounds=1", *PLAIN)


# Who is added up with whom --------------------------------------------------------------------------------


def test_groups_of_three_two_and_one():
    # By themselves where they are enough; the one joins the smallest, where nothing is nearer.
    assert groups_of(CHOICES, 2) == {(0,): ["0", "2", "5"], (1,): ["1", "4", "3"]}
    # The two and the one are three: they take what most of them chose.
    assert groups_of(CHOICES, 3) == {(0,): ["0", "2", "5"], (1,): ["1", "3", "4"]}
    # No choice has four clients, and all six take layer 0.
    assert groups_of(CHOICES, 4) == {(0,): ["0", "1", "2", "3", "4", "5"]}


def test_who_is_left_over_joins_the_group_that_is_nearest():
    two = {"a": (0, 1), "b": (0, 1), "c": (0, 1), "d": (2, 3), "e": (2, 3)}
    assert groups_of({**two, "f": (1, 4)}, 2) == {(0, 1): ["a", "b", "c", "f"], (2, 3): ["d", "e"]}
    assert groups_of({**two, "f": (4, 5)}, 2) == {(0, 1): ["a", "b", "c"], (2, 3): ["d", "e", "f"]}


def test_a_vote_may_bring_back_to_a_group():
    """Of three with other choices, two have 1 and two have 0: with the group of (0, 1) they are six."""
    choices = {"a": (0, 1), "b": (0, 1), "c": (0, 1), "d": (0, 2), "e": (1, 3), "f": (0, 1)}
    assert groups_of({**choices, "g": (0, 3), "h": (1, 2)}, 4)[0, 1][:4] == ["a", "b", "c", "f"]
    rest = {"d": (0, 2), "e": (1, 3), "g": (0, 5), "h": (1, 4)}
    assert groups_of({"a": (0, 1), "b": (0, 1), "c": (0, 1), **rest}, 3) == {(0, 1): [*"abcdegh"]}


def test_of_too_few_there_is_one_group_which_has_no_sum():
    assert groups_of({"a": (0,), "b": (1,)}, 3) == {(1,): ["a", "b"]}
    assert groups_of({}, 3) == {}


@given(
    st.dictionaries(
        st.text("abcdefgh", min_size=1, max_size=3), st.sampled_from([(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)])
    ),
    st.integers(2, 5),
)
def test_nobody_is_lost_and_no_group_is_too_small(choices, fewest):
    groups = groups_of(choices, fewest)
    clients = [client for group in groups.values() for client in group]
    assert sorted(clients) == sorted(choices)
    assert all(len(layers) == len({*layers}) == 2 for layers in groups)
    assert all(len(group) >= min(fewest, len(choices)) for group in groups.values())
    for client, own in choices.items():  # who has company enough keeps what it chose
        if sum(other == own for other in choices.values()) >= fewest:
            assert client in groups[own]


# What travels ---------------------------------------------------------------------------------------------


def test_a_question_for_the_choice_and_its_answer():
    roles = {f"{n}.mlp": Role("mlp", n) for n in range(3)} | {"head": Role("head")}
    choice = NamedSettings("random", {"top_k": 2, "tokens": None, "examples": 1})
    request = TrainRequest(1, Plan.full(roles), {}, choice=choice, choosing=True)
    assert read_train_request(request.json) == request and not request.trains
    assert "choosing" not in TrainRequest(1, Plan.full(roles), {}, choice=choice).json

    def problem(chosen, **more):
        return problem_of(Reply(request.digest, chosen=chosen, **more), request, {}, roles)

    assert problem([0, 2]) is None
    assert "chose 1 layers where 2" in problem([0])
    assert "does not have" in problem([0, 3]) and "one of them twice" in problem([1, 1])
    assert "more than its choice" in problem([0, 2], examples=3)
    assert "more than its choice" in problem([0, 2], metrics={"train_loss": 1.0})


# Whole rounds ---------------------------------------------------------------------------------------------


@pytest.fixture
def choosing(monkeypatch):
    """Make clients choose what they are told to; of a group's layers they have no choice."""
    real = train_handler.choose

    def make(choices):
        def choose(worker, client, request, start):
            if len(layers_of(request.plan.trained, worker.roles)) == request.chooser.top_k:
                return real(worker, client, request, start)
            own = request.plan.keep_layers(choices[client], worker.roles)
            return Chosen(own, real(worker, client, request, start).scores)

        monkeypatch.setattr(train_handler, "choose", choose)

    return make


def bytes_up(run):
    """Of arrays, by role; a masked reply's head has a line of its own."""
    by_role = dict(run.rows[1]["bytes_up_by_role"])
    return by_role.pop(work.MASKED, 0), by_role


def layer(model, number):
    found = {name: value for name, value in model.items() if f".{number}." in name}
    assert found
    return found


def test_groups_give_the_model_of_the_union_and_of_no_masks_in_fewer_bytes(train, choosing):
    choosing(EVEN)
    plain = train(*WORDS, folder="plain")
    union = train(*WORDS, ON, folder="union")
    groups = train(*WORDS, ON, GROUPS, folder="groups")
    rounding = [run.rows[1]["secure"]["rounding"] for run in (union, groups)]
    assert 0 < rounding[1] < rounding[0] < 1e-5  # a small cohort has finer steps
    assert far(plain, groups) <= rounding[1] + last_bits(plain)
    assert far(union, groups) <= sum(rounding) + last_bits(plain)
    row, other = groups.rows[1], plain.rows[1]
    assert row["secure"]["summed"] == row["clients_ok"] == 6
    assert row["secure"]["groups"] == [{"cohort": 3, "summed": 3}] * 2
    assert row["selection"] == other["selection"] == {c: list(own) for c, own in EVEN.items()}
    assert row["layer_scores"] == pytest.approx(other["layer_scores"], rel=1e-3)
    assert row["train_loss"] == pytest.approx(other["train_loss"], abs=1e-5)
    assert row["effective_clients"] == pytest.approx(other["effective_clients"])
    for group, figures in other["drift"].items():
        assert row["drift"][group] == pytest.approx(figures, rel=1e-2, abs=1e-3)
    # Four bytes a number, as without masks: what a client sends is what it chose.
    assert bytes_up(groups)[1] == bytes_up(plain)[1]
    assert bytes_up(groups)[0] < bytes_up(union)[0]
    assert groups.rows[1]["bytes_up"] < 0.6 * union.rows[1]["bytes_up"]
    # The model travels once: with the question, and not again with the order.
    assert groups.rows[1]["bytes_down_by_role"] == plain.rows[1]["bytes_down_by_role"]


@pytest.mark.parametrize("fewest", [2, 3])
def test_three_two_and_one_are_added_up_exactly(train, choosing, monkeypatch, fewest):
    """The one joins the two, and takes their layer: as in a plain run in which it had chosen that."""
    sent: dict[str, list[Vector]] = {}
    found: list[Vector] = []
    real_mask, real_decode = work.client.mask, masked.decode

    def mask(session, vector):
        copy = Vector(vector.head.copy(), vector.body.copy())
        sent.setdefault(session.terms.session, []).append(copy)
        return real_mask(session, vector)

    def decode(layout, rules, total):
        found.append(Vector(total.head.copy(), total.body.copy()))
        return real_decode(layout, rules, total)

    monkeypatch.setattr(work.client, "mask", mask)
    monkeypatch.setattr(masked, "decode", decode)
    choosing(CHOICES)
    few = f"secure_aggregation.min_cohort={fewest}"
    run = train(*WORDS, ON, GROUPS, few, "checkpoint.keep=1", folder="groups")
    assert [len(vectors) for vectors in sent.values()] == [3, 3] and len(found) == 2
    for vectors, total in zip(sent.values(), found, strict=True):
        assert (np.sum([v.head for v in vectors], axis=0, dtype=np.uint64) == total.head).all()
        assert (np.sum([v.body for v in vectors], axis=0, dtype=np.uint32) == total.body).all()
        assert all(v.body.any() for v in vectors)
    choosing({**CHOICES, "3": (1,)})
    plain = train(*WORDS, folder="plain")
    assert far(plain, run) <= run.rows[1]["secure"]["rounding"] + last_bits(plain)
    assert bytes_up(run)[1] == bytes_up(plain)[1]
    assert run.rows[1]["selection"]["3"] == [1] and run.rows[1]["selection"]["0"] == [0]
    start = train(*WORDS, "num_rounds=0", folder="start").model
    moved = {n: not same_bits(*(layer(model, n) for model in (start, run.model))) for n in range(4)}
    assert moved == {0: True, 1: True, 2: False, 3: False}


class Lossy(InProcessGrid):
    """Answers of `gone` are lost from a step on."""

    gone: dict[str, str] = {}  # noqa: RUF012
    STEPS = ("hello", "choose", "keys", "shares", "mask", "confirm", "unmask")

    def pull_messages(self, message_ids):
        found = []
        for message_id in message_ids:
            message = self.waiting.pop(message_id)
            client, kind = str(message.metadata.dst_node_id - 1), message.metadata.message_type
            step = "hello"
            if kind == MASKING:
                step = json.loads(masking_text(message))["step"]
            elif kind == MessageType.TRAIN:
                step = "choose" if read_train(message)[0].choosing else "mask"
            lost = client in self.gone and self.STEPS.index(step) >= self.STEPS.index(self.gone[client])
            error = Message(Error(code=2, reason="lost"), reply_to=message)
            found.append(error if lost else self.run_client(message))
        return found


@pytest.fixture
def lossy(monkeypatch):
    monkeypatch.setattr("fedfrozen_app.runtimes.inprocess.runtime.InProcessGrid", Lossy)
    monkeypatch.setattr(Lossy, "gone", {})
    return Lossy


LATER = [pytest.param(step, marks=pytest.mark.slow) for step in ("choose", "keys", "shares", "confirm")]


@pytest.mark.parametrize("step", ["mask", *LATER])
def test_a_client_lost_within_a_group(train, choosing, lossy, step):
    """Of six in two groups of three, with two enough for a sum."""
    choosing(EVEN)
    lossy.gone = {"2": step}
    run = train(*WORDS, ON, GROUPS, "secure_aggregation.min_cohort=2", folder="groups")
    inside = step == "confirm"  # its vector was in by then
    row = run.rows[1]
    assert [one["summed"] for one in row["secure"]["groups"]] == [2 + inside, 3]
    assert row["clients_ok"] == row["secure"]["summed"] == 5 + inside
    lossy.gone = {} if inside else {"2": "mask"}
    plain = train(*WORDS, folder="plain")
    assert far(plain, run) <= row["secure"]["rounding"] + last_bits(plain)


@pytest.mark.parametrize("step", ["mask", *slowly("unmask")])
def test_a_group_with_too_few_left_gives_no_sum_and_the_other_does(train, choosing, lossy, step):
    choosing(EVEN)
    lossy.gone = {"1": step, "3": step}
    run = train(*WORDS, ON, GROUPS, folder="groups")
    row = run.rows[1]
    assert sorted(one["summed"] for one in row["secure"]["groups"]) == [0, 3] and row["clients_ok"] == 3
    assert any("Client 4 was set aside: it was in a group without a sum" in why for why in row["failures"])
    assert set(row["selection"]) == {"0", "2", "5"} and "discarded" not in row
    lossy.gone = {"1": "mask", "3": "mask", "4": "mask"}
    plain = train(*WORDS, folder="plain")
    assert far(plain, run) <= row["secure"]["rounding"] + last_bits(plain)
    assert dict(masked_facts(run.rows[1:]))["Masked: smallest sum"] == "over 3 clients"


def test_with_no_group_left_the_model_stays_as_it_was(train, choosing, lossy):
    choosing(EVEN)
    lossy.gone = {"0": "mask", "1": "mask"}
    with pytest.raises(RunFailed, match="2 clients sent a masked update, and 3 are needed"):
        train(*WORDS, ON, GROUPS, folder="groups")


def test_groups_and_noise_are_refused_with_a_sentence():
    with pytest.raises(UserError, match="choices=groups has a client send its choice of layers before it"):
        read(resolved(compose_config([ON, GROUPS, "strategy=safl", "privacy=dp_sgd"])))


# Sites, and a server that means harm ----------------------------------------------------------------------

CHOOSING = ("strategy=safl", "strategy.top_k=1", "num_rounds=1", *PLAIN, ON)


@pytest.fixture
def choosers(sites):
    for name in sites.names:
        sites.change(name, "policy.yaml", strategies=["safl"])
    return sites


def test_sites_say_their_layers_and_write_it_down(choosers):
    run = choosers.train(*CHOOSING, GROUPS)
    assert run.rows[1]["secure"]["groups"] == [{"cohort": 3, "summed": 3}]
    events = log(choosers)
    assert [e["event"] for e in events] == [
        "hello",
        "chose",
        "keys",
        "roster",
        "sent",
        "confirmed",
        "unmasked",
    ]
    assert len(events[1]["layers"]) == 1 and events[1]["examples"] == 0 and events[1]["arrays"] == {}
    assert events[4]["masked"]["cohort"] == [*choosers.names]


def without(count):
    """A roster with so many of the sites, the one that is shown it among them."""

    def tampers(grid, step, site, text):
        if step != "shares":
            return text
        return with_roster(text, lambda r: sorted(r, key=lambda entry: entry[0] != site)[:count])

    return tampers


@pytest.mark.parametrize(("count", "why"), [(1, "names nobody else"), (2, "the cohort has 2 clients")])
def test_a_group_of_too_few_is_refused(choosers, count, why):
    reasons, events, _ = attack(choosers, without(count), *CHOOSING, GROUPS)
    assert all(why in found[-1] for found in reasons.values())
    assert "chose" in events and "sent" not in events and "roster" not in events


def test_an_order_that_lets_a_group_send_different_layers_is_refused(choosers):
    """The server knows who chose what: of a layer that one site sends, the sum would be its update."""
    whole = {}

    def tampers(grid, step, site, text):
        if step == "order":
            found = json.loads(text)
            if found.get("choosing"):
                whole.update(trained=found["trained"], shared=found["shared"])
            else:
                return json.dumps({**found, **whole}, separators=(",", ":"))
        return text

    reasons, events, _ = attack(choosers, tampers, *CHOOSING, GROUPS)
    assert all("leaves it a choice of layers" in found[-1] for found in reasons.values())
    assert "sent" not in events


def test_who_has_not_agreed_to_tell_its_layers_does_not(choosers):
    """The run is proposed as a union, and then the server asks."""

    def tampers(grid, step, site, text):
        if step == "order":
            found = json.loads(text)
            del found["masking"]
            return json.dumps({**found, "choosing": True}, separators=(",", ":"))
        return text

    reasons, events, _ = attack(choosers, tampers, *CHOOSING)
    assert all("asks which layers it would choose" in found[-1] for found in reasons.values())
    assert "chose" not in events and "sent" not in events
