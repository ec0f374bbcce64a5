"""Methods whose clients keep parts of the model: by hand, as FedAvg in the limit, judged one by one."""

import json

import pytest
import torch

from fedfrozen_app.commands.show_plan import plan as show_plan
from fedfrozen_app.core.errors import UserError
from tests.comparing import assert_alike
from tests.conftest import same_bits, slowly
from tests.resuming import resumed_and_whole
from tests.strategies.by_hand import (  # noqa: F401
    BODY,
    HEAD,
    accuracy,
    assert_same,
    descend,
    hand,
    kept_by,
    mean,
)


def redo(known, local_work, home):
    """By hand: (what is shared, each client's own); `local_work` is one client's round on its whole model."""
    shared = {name: value for name, value in known.start.items() if name not in home}
    own = {client: {name: known.start[name] for name in home} for client in known.rows}
    for cohort in known.cohorts:
        trained = {client: local_work(shared | own[client], *known.rows[client]) for client in cohort}
        own |= {client: {name: arrays[name] for name in home} for client, arrays in trained.items()}
        sent = [{name: arrays[name] for name in shared} for arrays in trained.values()]
        shared = mean(sent, [known.count(client) for client in trained])
    return shared, own


def head_then_body(w, x, y):
    """As PFLlib's clientrep has it too: head epochs with the body fixed, then the body."""
    return descend(descend(w, x, y, HEAD, steps=2), x, y, BODY)


CASES = {
    "fedper": ([], descend, HEAD, "embedding"),
    "fedrep": ([], head_then_body, HEAD, "embedding"),
    "private_attention": (["model.source=attentive", "strategy.private=[query,key]"], descend, BODY, "head"),
}


@pytest.mark.parametrize("runner", ["cohort", *slowly("sequential")])
@pytest.mark.parametrize("strategy", CASES)
def test_rounds_by_hand(hand, runner, strategy):  # noqa: F811
    words, local_work, home, travels = CASES[strategy]
    known = hand(f"strategy={strategy}", *words)
    found = known.run(runner)
    shared, own = redo(known, local_work, home)
    assert_same(found.model, shared)
    assert all(torch.equal(found.model[n], torch.from_numpy(known.start[n])) for n in home)  # the server's
    judged = json.loads((found.folder / "personal.json").read_text())["clients"]
    for row in judged:
        client = row["client"]
        assert_same(kept_by(found, client), own[client])
        personal = shared | own[client]
        after = local_work(personal, *known.rows[client])
        assert row["personal"] == accuracy(personal, *known.test[client])
        assert row["after"] == accuracy(after, *known.test[client])
    assert len(judged) == len(known.rows)
    assert found.rows[-1]["bytes_up_by_role"].keys() == {travels}


@pytest.mark.parametrize("strategy", ["fedrep", *slowly("fedper", "private_attention")])
def test_with_nothing_private_it_is_fedavg(train, strategy):
    words = ("participation=0.7", "num_rounds=2")
    plain = train("strategy=fedavg", *words, folder="plain")
    found = train(f"strategy={strategy}", "strategy.private=[]", *words, folder=strategy)
    assert same_bits(found.model, plain.model)
    assert [row["bytes_up"] for row in found.rows[1:]] == [row["bytes_up"] for row in plain.rows[1:]]


def test_private_attention_keeps_queries_keys_and_values_home(train):
    found = train("strategy=private_attention", "participation=0.7", "client.weight_decay=0.1", "seed=1")
    sent = {role for row in found.rows[1:] for role in row["bytes_up_by_role"]}
    down = {role for row in found.rows[1:] for role in row["bytes_down_by_role"]}
    assert sent == down == {"embedding", "output", "mlp", "norm", "head"}
    kept = {client: kept_by(found, client) for client in found.rows[-1]["clients"]}
    first, second = kept.values()
    assert len(first) == 2 * 3 * 2 and first.keys() == second.keys()  # two layers, three roles, with biases
    assert not any(torch.equal(first[name], second[name]) for name in first)


METHODS = ["fedper", "fedrep", "private_attention"]
FLOAT64 = ["model.dtype=float64", "client=sgd", "client.momentum=0", "client.lr=0.05"]
FLOAT64 += ["participation=0.7", "model.config.num_hidden_layers=1", "num_rounds=2"]


@pytest.mark.parametrize("strategy", ["fedrep", *slowly("fedper", "private_attention")])
def test_both_runners_agree(train, strategy):
    words = (f"strategy={strategy}", *FLOAT64)
    runs = [train(*words, f"runtime.runner={r}", folder=r) for r in ("sequential", "cohort")]
    assert_alike(*runs)
    assert runs[0].summary["personal"].keys() == runs[1].summary["personal"].keys()
    means = [run.summary["personal"]["personal"]["mean"] for run in runs]
    assert means[0] == pytest.approx(means[1])


@pytest.mark.parametrize("strategy", METHODS)
@pytest.mark.slow
def test_resumed_equals_unbroken(train, monkeypatch, strategy):
    words = (f"strategy={strategy}", "participation=0.7")
    resumed, whole = resumed_and_whole(train, monkeypatch, *words)
    assert resumed.summary["personal"] == whole.summary["personal"]


def test_a_part_that_the_model_lacks_is_said_before_the_first_round():
    with pytest.raises(UserError, match=r"strategy\.private names 'query', which no parameter of this model"):
        show_plan(["strategy=private_attention", "model=linear"])
