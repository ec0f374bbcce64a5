"""Plans by stages: what trains when, by hand and to the bit against the strategies that are schedules."""

import pytest
import torch

from fedfrozen_app.commands.show_plan import plan as show_plan
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.models.select import selected
from strategies.schedule import Scheduled, Stage
from tests.conftest import same_bits
from tests.resuming import resumed_and_whole
from tests.server.adding_clients import MEAN, ROLES, run
from tests.strategies.by_hand import BODY, HEAD, assert_same, descend, hand, mean  # noqa: F401

TWO_LAYERS = {
    "embed": Role("embedding"),
    "norm": Role("norm", feeds_attention=True),
    "q0": Role("query", 0),
    "v0": Role("value", 0),
    "q1": Role("query", 1),
    "v1": Role("value", 1),
    "final": Role("norm"),
    "head": Role("head"),
}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["all"], list(TWO_LAYERS)),
        (["kernel"], ["q0", "q1"]),
        (["stem"], ["embed", "norm"]),
        (["top"], ["final", "head"]),
        (["layer.-1"], ["q1", "v1"]),
        (["query.0", "head"], ["q0", "head"]),
        (["attention_norm"], ["norm"]),
        ([], []),
    ],
)
def test_words_name_parameters(words, names):
    assert selected(words, TWO_LAYERS, "strategy.private") == names


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("tail", "strategy.private names 'tail', which is neither a role nor a layer"),
        ("layer", "neither a role nor a layer"),
        ("query.x", "neither a role nor a layer"),
        ("layer.2", "this model's layers go from 0 to 1"),
        ("mlp", "which no parameter of this model is"),
        ("head.0", "which no parameter of this model is"),
    ],
)
def test_a_word_that_names_nothing_is_refused(word, says):
    with pytest.raises(UserError, match=says):
        selected([word], TWO_LAYERS, "strategy.private")


def test_a_cycle_goes_on_with_its_first_round():
    schedule = Scheduled.__new__(Scheduled)
    schedule.stages = [Stage(1, "full"), Stage(3, "a"), Stage(5, "b"), Stage(7, "between")]
    schedule.cycle = (3, 7)
    words = ["full", "full", *2 * ["a", "a", "b", "b", "between"], "a"]
    assert [schedule.stage(number) for number in range(1, 14)] == words


def test_two_rounds_by_hand():
    """Everything, then the head alone: a round adds MEAN to what trains."""
    stages = [{"from": 1, "name": "all"}, {"from": 2, "name": "head", "train": ["head"]}]
    strategy, rows, seen = run("schedule", num_rounds=3, stages=stages)
    for name, value in strategy.model.items():
        expected = 3 * MEAN if name == "head" else MEAN
        assert torch.allclose(value, torch.full_like(value, expected)), name
    assert [row["stage"] for row in rows] == ["initial", "all", "head", "head"]
    assert rows[2]["bytes_up_by_role"] == {"head": 2 * 2 * 4}  # two clients, two float32
    assert seen[-1][1].plan.trained == ("head",)


def test_fedpart_by_hand():
    """One layer here: stem, layer, top in turn after one full round, with one full round between cycles."""
    settings = {"full_rounds": 1, "group_rounds": 1, "between_rounds": 1}
    strategy, rows, _ = run("fedpart", num_rounds=6, **settings)
    assert [row["stage"] for row in rows[1:]] == ["full", "stem", "layer.0", "top", "full", "stem"]
    rounds = {"embed": 4, "head": 3}  # of six: the full ones, and those of its group
    for name, value in strategy.model.items():
        trained = rounds.get(name, 3)
        assert torch.allclose(value, torch.full_like(value, trained * MEAN)), name


def test_fedpart_s_cycle_without_full_rounds_between_is_the_reference_s():
    """Fling's pipeline: 5 full rounds, then group (t − 5) // 2 mod the number of groups, t from 0."""
    strategy, _, _ = run("fedpart", num_rounds=0, between_rounds=0)
    groups = ["stem", "layer.0", "top"]
    for t in range(40):
        expected = "full" if t < 5 else groups[(t - 5) // 2 % len(groups)]
        assert strategy.stage(t + 1) == expected
        trained = set(strategy.plan(t + 1).trained)
        assert trained == (set(ROLES) if t < 5 else set(selected([expected], ROLES, "")))


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
def test_rounds_of_gradient_descent_by_hand(hand, runner):  # noqa: F811
    """Round 1 moves both parts, round 2 the head alone, round 3 the body alone, of whoever is drawn."""
    stages = "[{from:1},{from:2,train:[head]},{from:3,freeze:[head]}]"
    known = hand("strategy=schedule", f"strategy.stages={stages}")
    found, w = known.run(runner), known.start
    for cohort, names in zip(known.cohorts, ((*BODY, *HEAD), HEAD, BODY), strict=True):
        w = mean([descend(w, *known.rows[c], names) for c in cohort], [known.count(c) for c in cohort])
    assert_same(found.model, w)


@pytest.mark.slow
def test_configured_as_fedfrozen_it_gives_fedfrozen_s_bits(train):
    stages = "strategy.stages=[{from:1,name:warmup},{from:2,name:frozen,freeze:[kernel]}]"
    words = ("participation=0.7", "client.weight_decay=0.1")
    one = train("strategy=fedfrozen", "strategy.warmup_rounds=1", *words, folder="a")
    other = train("strategy=schedule", stages, *words, folder="b")
    assert same_bits(one.model, other.model)
    same = ("stage", "bytes_up_by_role", "bytes_down_by_role", "trained_params", "train_loss", "test_loss")
    told = [[[row.get(key) for key in same] for row in run.rows] for run in (one, other)]
    assert told[0] == told[1]


@pytest.mark.slow
def test_configured_as_fedpart_it_gives_fedpart_s_bits(train):
    words = ("num_rounds=8", "participation=0.7", "client.weight_decay=0.1")
    part = ("strategy.full_rounds=1", "strategy.group_rounds=1", "strategy.between_rounds=1")
    groups = enumerate(["stem", "layer.0", "layer.1", "top"])
    stages = [f"{{from:{n + 2},name:{word},train:[{word}]}}" for n, word in groups]
    text = f"strategy.stages=[{{from:1,name:full}},{','.join(stages)},{{from:6,name:full}}]"
    one = train("strategy=fedpart", *part, *words, folder="a")
    other = train("strategy=schedule", text, "strategy.cycle=[2,6]", *words, folder="b")
    assert same_bits(one.model, other.model)
    assert [row["stage"] for row in one.rows] == [row["stage"] for row in other.rows]


@pytest.mark.slow
def test_fedpart_of_full_rounds_alone_is_fedavg(train):
    one = train("strategy=fedavg", folder="a")
    assert same_bits(one.model, train("strategy=fedpart", "strategy.full_rounds=3", folder="b").model)


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=fedpart", "strategy.full_rounds=1", "strategy.group_rounds=1"),
        ("strategy=schedule", "strategy.stages=[{from:1,train:[head]},{from:2}]"),
    ],
    ids=["fedpart", "schedule"],
)
@pytest.mark.slow
def test_killed_and_resumed_to_the_bit(train, monkeypatch, words):
    resumed_and_whole(train, monkeypatch, *words, "participation=0.7")


def test_frozen_names_do_not_move_under_weight_decay(train):
    words = ("strategy=fedpart", "strategy.full_rounds=0", "client.weight_decay=0.5", "checkpoint.keep=9")
    found = train(*words, "strategy.group_rounds=1", "num_rounds=2")
    first, second = found.model_after(1), found.model_after(2)
    moved = {name for name in first if not torch.equal(first[name], second[name])}
    assert moved and all(".0." in name for name in moved)  # layer 0 alone


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["strategy.stages=[{from:2}]"], "must begin with from: 1"),
        (["strategy.stages=[{from:1},{from:1}]"], "each later one in a later round"),
        (["strategy.stages=[{from:1,freze:[head]}]"], "Stage 1 of strategy.stages has a key 'freze'"),
        (["strategy.stages=[{from:1,freeze:head}]"], "write train and freeze as lists"),
        (["strategy.stages=[{from:1,freeze:[head],train:[head]}]"], "has both train and freeze"),
        (["strategy.stages=[{name:a}]"], "needs from: ROUND"),
        (["strategy.cycle=[3]"], "must be two rounds"),
        (["strategy.cycle=[3,2]"], "must be two rounds"),
    ],
)
def test_stages_that_cannot_be_are_refused(words, says):
    with pytest.raises(UserError, match=says):
        read(resolved(compose_config(["strategy=schedule", *words])))


def test_a_role_that_the_model_lacks_is_said_before_the_first_round():
    with pytest.raises(UserError, match=r"strategy\.stages names 'prompt'"):
        show_plan(["strategy=schedule", "strategy.stages=[{from:1,freeze:[prompt]}]"])
    with pytest.raises(UserError, match=r"strategy\.groups names 'layer\.7'"):
        show_plan(["strategy=fedpart", "strategy.groups=[[layer.7]]"])


@pytest.mark.parametrize(
    ("model", "stages"),
    [
        ("simple_cnn", ["embedding", "mlp", "head"]),
        ("moderate_cnn", ["embedding", "mlp", "head"]),
        ("linear", ["head"]),
    ],
)
def test_fedpart_goes_by_role_where_there_are_no_layers(model, stages, capsys):
    words = ["strategy.full_rounds=0", "strategy.between_rounds=0", "strategy.group_rounds=1"]
    show_plan(["strategy=fedpart", f"model={model}", f"num_rounds={len(stages)}", *words])
    said = capsys.readouterr().out
    assert all(f"{stage}: 1 round" in said for stage in stages)
