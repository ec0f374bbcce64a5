"""A server that subtracts one masked sum from another, over almost the same sites from the same model; and
honest runs, which still work."""

import itertools
import json

import numpy as np
import pytest
import torch
from flwr.app import Error, Message, MessageType
from flwr.common.constant import ErrorCode

from fedfrozen_app.config import check_config, compose_run
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.exchange.masking_messages import MASKING, masking_text
from fedfrozen_app.server.base import PlannedFedAvg
from fedfrozen_app.server.sampling import batches_of, draw_batches
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.differencing import MaskedSum, SumMemory, groups_of
from fedfrozen_app.sites.refusals import RequestRefused
from tests.sites.inprocess import SiteGrid, Sites

# One step over all rows: the same model gives the same update, in whatever round.
WORDS = (
    *("client.batch_size=500", "client.local_epochs=1", "client.lr_schedule=constant"),
    *("client.optimizer=sgd", "client.weight_decay=0", "client.lr=0.05"),
)
BATCHED = ("secure_aggregation=on", "secure_aggregation.min_cohort=2")
MASKS = (*BATCHED, "aggregation.cohorts=free")
ROUND = ("num_rounds=1", "strategy.warmup_rounds=1")
ROUNDS = ("num_rounds=2", "strategy.warmup_rounds=2")
APART = "would tell the updates of west apart from all others, and 2 sites are the fewest"


@pytest.fixture
def sites(sites):
    for name in sites.names:
        sites.change(name, "policy.yaml", min_cohort=2)
    return sites


@pytest.fixture
def by_model(sites):
    """Their stewards have chosen the weaker rule."""
    for name in sites.names:
        sites.change(name, "policy.yaml", differencing="model")
    return sites


def log(sites, name="north"):
    return read_audit(sites.kit(name).audit)


def refusals(sites, name="north"):
    return [entry["reason"] for entry in log(sites, name) if entry["event"] == "refused"]


class Grid(SiteGrid):
    """`gone`: nodes that are not connected; `lost`: (round, step, node) that get no answer."""

    gone: tuple[int, ...] = ()
    lost: tuple[tuple[str, str, int], ...] = ()

    def get_node_ids(self):
        return [node for node in super().get_node_ids() if node not in self.gone]

    def run_client(self, message):
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        step = json.loads(masking_text(message))["step"] if kind == MASKING else kind
        if (message.metadata.group_id, step, node) in self.lost:
            return Message(Error(ErrorCode.UNKNOWN, "lost"), reply_to=message)
        return super().run_client(message)


def grid(**more):
    return type("Some", (Grid,), more)


# Attacks ------------------------------------------------------------------------------------------------


def vector(update):
    return torch.cat([update[name].double().flatten() for name in sorted(update) if "key.bias" not in name])


@pytest.fixture
def stuck(monkeypatch):
    """A server that keeps every mean update to itself, and sends the same model again."""
    found = []

    def step(self, update):
        found.append(vector(update.model))
        return {}

    monkeypatch.setattr(PlannedFedAvg, "step", step)
    return found


def west_of(sites, three, two):
    """West's update as the difference of two sums, worked out from the means and the numbers of rows."""
    rows = {
        name: next(e["examples"] for e in log(sites, name) if e["event"] == "sent" and e["run"] == "plain")
        for name in sites.names
    }
    all_rows = sum(rows.values())
    return (all_rows * three - (all_rows - rows["west"]) * two) / rows["west"]


def test_the_same_model_in_the_next_round_with_one_site_less(sites, stuck):
    """Before, the server had west's update: the difference of the two sums, to the rounding of the masks."""
    sites.train(*WORDS, *ROUND, "run_id=plain", folder="plain")
    west = sites.train(
        *(*WORDS, *ROUND, "run_id=west", "runtime.min_nodes=1"), folder="west", make_grid=grid(gone=(1, 2))
    )
    assert west.rows[1]["clients"] == ["west"]
    true, done = stuck[-1], len(stuck)

    class Leaves(Grid):
        def run_client(self, message):
            step = json.loads(masking_text(message))["step"] if "masking" in message.content else ""
            if step == "unmask":
                self.gone = (3,)  # from the next round on
            return super().run_client(message)

    run = sites.train(*WORDS, *MASKS, *ROUNDS, make_grid=Leaves)
    assert run.rows[1]["clients_ok"] == 3
    if len(stuck) > done + 1:
        told = west_of(sites, *stuck[done:])
        pytest.fail(f"the server has west's update, {(told - true).norm() / true.norm():.0e} of its norm off")
    assert APART in refusals(sites)[-1] and APART in refusals(sites, "south")[-1]


def test_the_same_proposal_under_another_run_id_with_one_site_less(sites, stuck):
    sites.train(*WORDS, *ROUND, "run_id=plain", folder="plain")
    sites.train(
        *(*WORDS, *ROUND, "run_id=west", "runtime.min_nodes=1"), folder="west", make_grid=grid(gone=(1, 2))
    )
    true, done = stuck[-1], len(stuck)
    sites.train(*WORDS, *MASKS, *ROUND, folder="first")
    two = (*WORDS, *MASKS, *ROUND, "run_id=second", "runtime.min_nodes=2")
    try:
        sites.train(*two, folder="second", make_grid=grid(gone=(3,)))
    except RunFailed as error:
        assert "0 clients sent a masked update, and 2 are needed: no sum was unmasked" in str(error)
        assert APART in refusals(sites)[-1] and APART in refusals(sites, "south")[-1]
        return
    told = west_of(sites, *stuck[done:])
    pytest.fail(f"the server has west's update, {(told - true).norm() / true.norm():.0e} of its norm off")


def test_survivors_that_leave_one_site_out_are_refused_too(by_model):
    """The roster is that of the earlier sum, and west is said to have dropped out of the second one."""
    by_model.train(*WORDS, *MASKS, *ROUND, folder="first")
    lost = (("1", MessageType.TRAIN, 3),)
    with pytest.raises(RunFailed, match="0 clients confirmed the sum, and 2 are needed"):
        by_model.train(*WORDS, *MASKS, *ROUND, "run_id=second", folder="second", make_grid=grid(lost=lost))
    assert APART in refusals(by_model)[-1]


@pytest.mark.parametrize("rule", ["data", pytest.param("model", marks=pytest.mark.slow)])
def test_a_model_that_differs_by_one_unit_in_its_last_place(sites, stuck, monkeypatch, rule):
    """Under `model` another model is another sum, and what a server changes in it may be next to nothing."""
    for name in sites.names:
        sites.change(name, "policy.yaml", differencing=rule)
    sites.train(*WORDS, *ROUND, "run_id=plain", folder="plain")
    sites.train(
        *(*WORDS, *ROUND, "run_id=west", "runtime.min_nodes=1"), folder="west", make_grid=grid(gone=(1, 2))
    )
    true, done = stuck[-1], len(stuck)

    def step(self, update):
        stuck.append(vector(update.model))
        name = min(update.model)
        bumped = torch.zeros_like(update.model[name])
        bumped.view(-1)[0] = 2.0**-24
        return {name: self.model[name] + bumped}

    monkeypatch.setattr(PlannedFedAvg, "step", step)

    class Leaves(Grid):
        def run_client(self, message):
            if message.metadata.group_id == "1" and "masking" in message.content:
                self.gone = (3,) if json.loads(masking_text(message))["step"] == "unmask" else ()
            return super().run_client(message)

    sites.train(*WORDS, *MASKS, *ROUNDS, "runtime.min_nodes=2", make_grid=Leaves)
    if rule == "data":
        assert len(stuck) == done + 1 and "with the earlier sums of this view" in refusals(sites)[-1]
    else:  # what the threat model says of that rule
        told = west_of(sites, *stuck[done:])
        assert (told - true).norm() < 0.01 * true.norm() and not refusals(sites)


# Honest runs --------------------------------------------------------------------------------------------


def test_by_default_a_batch_that_misses_a_site_gives_no_sum_and_the_run_goes_on(sites):
    lost = (("1", MessageType.TRAIN, 3),)
    run = sites.train(*WORDS, *BATCHED, "num_rounds=3", "strategy.warmup_rounds=3", make_grid=grid(lost=lost))
    assert [row["secure"].get("summed") for row in run.rows[1:]] == [None, 3, 3]
    assert "2 of the 3 clients of a batch sent an update" in run.rows[1]["discarded"]
    assert not refusals(sites)


def test_a_site_that_drops_out_of_a_round_is_in_the_next_one(by_model):
    """The model has moved between the two: their sums are of different updates."""
    run = by_model.train(*WORDS, *MASKS, *ROUNDS, make_grid=grid(lost=(("1", MessageType.TRAIN, 3),)))
    assert [row["clients_ok"] for row in run.rows[1:]] == [2, 3]
    assert not refusals(by_model)


def test_the_same_run_again_and_another_one_over_the_same_sites(sites):
    for folder, words in (("first", ()), ("again", ()), ("other", ("run_id=other", "client.lr=0.1"))):
        run = sites.train(*WORDS, *MASKS, *ROUND, *words, folder=folder)
        assert run.rows[1]["clients_ok"] == 3
    assert not refusals(sites)


class Killed(Exception):
    """The server ends."""


def test_a_round_that_a_killed_server_repeats_is_asked_of_the_same_sites(by_model):
    """West drops out, the others agree to the sum, and the server dies before it has it. West is back then:
    it is left out of the repeated round, and in the next one."""

    class Dies(Grid):
        lost = (("2", MessageType.TRAIN, 3),)

        def run_client(self, message):
            step = json.loads(masking_text(message))["step"] if "masking" in message.content else ""
            if (message.metadata.group_id, step) == ("2", "unmask"):
                raise Killed
            return super().run_client(message)

    words = (*WORDS, *MASKS, "num_rounds=3", "strategy.warmup_rounds=3", "checkpoint.every=1")
    with pytest.raises(Killed):
        by_model.train(*words, make_grid=Dies)
    run = by_model.train(*words, resume=True)
    all_three = ["north", "south", "west"]
    assert [row["clients"] for row in run.rows[1:]] == [all_three, ["north", "south"], all_three]
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 2, 3] and not refusals(by_model)


def test_a_round_without_a_result_does_not_stop_the_next_one(by_model):
    """All agree to the sum, and too few unmask it. The next round begins from the same model: same sites."""
    lost = tuple(("1", step, node) for step, node in [("unmask", 1), ("unmask", 2), (MessageType.TRAIN, 3)])
    run = by_model.train(*WORDS, *MASKS, *ROUNDS, make_grid=grid(lost=lost))
    assert "discarded" in run.rows[1] and run.rows[2]["clients"] == ["north", "south"]
    assert run.rows[2]["clients_ok"] == 2 and not refusals(by_model)


def test_the_operator_learns_whom_a_round_needs(by_model, caplog):
    """The one honest setting that is refused: after such a round, one of its sites does not come back."""

    class Leaves(Grid):
        lost = tuple(("1", "unmask", node) for node in (1, 2, 3))

        def run_client(self, message):
            if message.metadata.group_id == "1":
                self.gone = (3,)
            return super().run_client(message)

    with pytest.raises(RunFailed):
        by_model.train(*WORDS, *MASKS, *ROUNDS, "runtime.min_nodes=2", make_grid=Leaves)
    assert (
        "Round 2: an earlier sum from this model was over north, south, west. Sites agree to no other, and "
        "west is not there: start it, or begin another run from another model (seed=)." in caplog.text
    )
    assert APART in refusals(by_model)[-1]


def test_a_private_run_is_bound_by_its_epsilon_instead(sites):
    for name in sites.names:
        sites.change(name, "policy.yaml", max_epsilon=20)
    private = ("privacy=dp_sgd", "privacy.epsilon=4", "secure_aggregation.max_examples=200")
    sites.train(*MASKS, *ROUND, *private, folder="first")
    words = (*MASKS, *ROUND, *private, "run_id=second", "runtime.min_nodes=2")
    run = sites.train(*words, folder="second", make_grid=grid(gone=(3,)))
    assert run.rows[1]["clients_ok"] == 2 and not refusals(sites)
    assert all("model" not in entry for entry in log(sites) if entry["event"] == "confirmed")


@pytest.fixture
def five(tmp_path, monkeypatch):
    monkeypatch.setattr("fedfrozen_app.report.output.write_curves", lambda *args, **kwargs: None)
    found = Sites(tmp_path / "five", names=("a", "b", "c", "d", "e"), rows=300)
    found.folder.mkdir()
    found.prepare()
    for name in found.names:
        found.change(name, "policy.yaml", differencing="data", secure_aggregation="required", min_cohort=2)
    return found


FIVE = (*WORDS, *MASKS, "num_rounds=4", "strategy.warmup_rounds=4", "runtime.min_nodes=5")
BATCHES = "aggregation.cohorts=batches"


@pytest.mark.slow
def test_batches_live_with_a_policy_that_compares_all_sums(five):
    """Whole batches are drawn; one that misses a site gives no sum, and the other's counts."""
    run = five.train(*FIVE, BATCHES, "participation=0.5")
    assert {tuple(row["clients"]) for row in run.rows[1:]} == {("a", "b"), ("c", "d", "e")}
    lost = (("2", MessageType.TRAIN, 5),)
    run = five.train(*FIVE, BATCHES, "run_id=all", folder="all", make_grid=grid(lost=lost))
    assert [row["secure"]["summed"] for row in run.rows[1:]] == [5, 2, 5, 5]
    assert "2 of the 3 clients of a batch sent an update: no sum was unmasked" in str(run.rows[2]["failures"])
    assert not refusals(five, "a") and not refusals(five, "e")
    with pytest.raises((RunFailed, UserError)):  # free cohorts of four: one site less than before
        five.train(*FIVE, "participation=0.8", "run_id=free", folder="free")
    assert all("with the earlier sums of this view" in refusals(five, name)[-1] for name in ("d", "e"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "it needs secure_aggregation=on, and privacy=none"),
        (("secure_aggregation=on", "privacy=dp_sgd"), "it needs secure_aggregation=on, and privacy=none"),
        (("secure_aggregation=on", "secure_aggregation.choices=groups"), "use one of them"),
    ],
)
def test_batches_are_for_masked_sums_without_noise(words, sentence):
    with pytest.raises(UserError, match=sentence):
        check_config(compose_run([BATCHES, *words]).config)


def test_batches_in_a_simulation(train):
    run = train(BATCHES, "secure_aggregation=on", "num_clients=7", "participation=0.5", "num_rounds=2")
    assert {tuple(row["clients"]) for row in run.rows[1:]} <= {("0", "1", "2"), ("3", "4", "5", "6")}
    assert all(row["secure"]["summed"] == len(row["clients"]) for row in run.rows[1:])


# The rule -----------------------------------------------------------------------------------------------


def agreed(cohorts, fewest):
    """Those of the cohorts that a site agrees to, one after another."""
    memory, taken = SumMemory(), []
    for number, cohort in enumerate(cohorts):
        asked = MaskedSum("", number, "model", "view", private=False)
        try:
            memory.check(asked, cohort, "model", fewest)
        except RequestRefused:
            continue
        memory.learn(asked.entry(cohort))
        taken.append(cohort)
    return taken


def test_no_combination_of_agreed_sums_is_over_fewer_sites():
    """Not only differences of two: any whole-numbered combination of four."""
    drawn, sites = np.random.default_rng(0), list("abcdefghij")
    most = 0
    for _ in range(60):
        fewest = int(drawn.integers(2, 4))
        wanted = [drawn.choice(sites, drawn.integers(fewest, 10), replace=False) for _ in range(40)]
        taken = agreed([{"a", *cohort.tolist()} for cohort in wanted], fewest)[:4]
        most = max(most, len(taken))
        rows = np.array([[site in cohort for site in sites] for cohort in taken], int)
        for factors in itertools.product(range(-2, 3), repeat=len(taken)):
            told = np.count_nonzero(np.array(factors) @ rows)
            assert told == 0 or told >= fewest, (taken, factors)
    assert most > 1


def test_what_counts_as_the_same():
    asked = MaskedSum("s", 1, "model", "view", private=False)
    memory = SumMemory()
    memory.learn(asked.entry("abcd"))
    memory.check(asked, "abcd", "model", 3)
    memory.check(MaskedSum("s", 2, "another", "view", private=False), "abc", "model", 3)
    memory.check(MaskedSum("s", 2, "model", "view", private=True), "abc", "model", 3)
    memory.check(MaskedSum("s", 2, "another", "another", private=False), "abc", "data", 3)
    for other, rule in (("model", "model"), ("another", "data")):
        with pytest.raises(RequestRefused, match="of d apart"):
            memory.check(MaskedSum("s", 2, other, "view", private=False), "abc", rule, 3)
    assert groups_of([frozenset("abcd"), frozenset("cdef")]) == {
        *map(frozenset, ("ab", "cd", "ef")),
    }


def test_batches_are_the_same_whoever_draws_them():
    names = [str(number) for number in range(11)]
    batches = batches_of(names, 3)
    assert batches == [["0", "1", "2"], ["3", "4", "5"], ["6", "7", "8", "9", "10"]]
    assert batches_of(reversed(names), 3) == batches and batches_of(["b", "a"], 3) == [["a", "b"]]
    for number in range(20):
        drawn = draw_batches(batches, 0.67, 0, number)
        assert len(drawn) in (6, 8) and batches_of(drawn, 3) == [b for b in batches if b[0] in drawn]
