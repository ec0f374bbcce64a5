"""Whole runs with adapters: what trains, what travels to the byte, and that exact rules are exact."""

import re

import pytest
import torch

from fedfrozen_app.adapters import lora
from fedfrozen_app.adapters.merged_deltas import is_merged_delta
from fedfrozen_app.commands.forecast import forecast
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.run import federate
from tests.conftest import SMALL, same_bits, slowly, worker_of

# ViT of SMALL: width 16, mlp 32, two layers, ten classes; three clients.
LORA = ["strategy=fedavg", "adapter=lora", "adapter.rank=2", "adapter.alpha=3", "track.tensorboard=false"]
EXACT = [*LORA, "model.dtype=float64", "client.lr=0.02", "checkpoint.keep=9"]
SCALE, WIDTH, RANK, CLASSES = 1.5, 16, 2, 10
PAIR = RANK * WIDTH * 4  # bytes of A, and of B
HEAD = (WIDTH * CLASSES + CLASSES) * 4


@pytest.fixture
def uploads(monkeypatch):
    """(round, client): examples and the arrays of its reply."""
    found = {}

    def keep(server_round, client, reply, model):
        found[server_round, client] = reply.examples, {n: v.clone() for n, v in reply.arrays.items()}

    monkeypatch.setattr(federate, "upload_saver", lambda config, folder: keep)
    return found


def changes(model):
    """By projection: how far its weight is from the base, with all that the model says."""
    merged_deltas = lora.merged_deltas_by_path(
        {name: value for name, value in model.items() if is_merged_delta(name)}
    )
    found = {}
    for path in lora.adapted(model):
        found[path] = SCALE * model[f"{path}.{lora.B}"] @ model[f"{path}.{lora.A}"]
        if path in merged_deltas:
            found[path] = found[path] + lora.sum_of(merged_deltas[path])
    return found


def mean_of_clients(uploads, number, before):
    """The same for the weighted mean of the clients' own models in a round."""
    sent = [found for (server_round, _), found in uploads.items() if server_round == number]
    total, mean = sum(examples for examples, _ in sent), {}
    for examples, arrays in sent:
        whole = {
            name: lora.widened(name, a, before[name].shape) if lora.is_adapter(name) else a
            for name, a in arrays.items()
        }
        for path, change in changes({**before, **whole}).items():
            mean[path] = mean.get(path, 0) + examples / total * change
    return mean


@pytest.mark.parametrize("ranks", [["+adapter.ranks.1=1"], *slowly([])])
@pytest.mark.parametrize("rule", ["fedex", "stack", "ffa"])
def test_exact_rules_make_the_mean_of_the_clients_models(train, uploads, rule, ranks):
    run = train(*EXACT, f"adapter.rule={rule}", *ranks)
    for number in (2, 3):
        expected = mean_of_clients(uploads, number, run.model_after(number - 1))
        for path, change in changes(run.model_after(number)).items():
            assert change.norm() > 0
            torch.testing.assert_close(change, expected[path], rtol=0, atol=1e-9)
    if ranks:  # filled up with zeros, which stay
        wide = {
            client: int(arrays[next(n for n in arrays if n.endswith(lora.B))].any(dim=0).sum())
            for (number, client), (_, arrays) in uploads.items()
            if number == 2
        }
        assert wide == {"0": 2, "1": 1, "2": 2}


def test_plain_averaging_misses_that_mean(train, uploads):
    run = train(*EXACT, "client.local_epochs=4")
    expected = mean_of_clients(uploads, 3, run.model_after(2))
    gaps = {p: (c - expected[p]).norm() / expected[p].norm() for p, c in changes(run.model_after(3)).items()}
    assert 0.005 < max(gaps.values()) < 1


@pytest.mark.parametrize("rule", ["fedex", *slowly("average", "ffa", "stack")])
def test_both_runners_agree(train, rule):
    words = [*EXACT, f"adapter.rule={rule}", "adapter.targets=all"]
    one, other = (train(*words, f"runtime.runner={r}", folder=r).model for r in ("sequential", "cohort"))
    assert list(one) == list(other)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", ["stack", *slowly("average", "fedex")])
def test_a_run_that_was_stopped_goes_on_to_the_bit(train, rule):
    words = [*LORA, f"adapter.rule={rule}", "client.lr_schedule=constant"]
    whole = train(*words, "num_rounds=4", folder="whole")
    train(*words, "num_rounds=2", folder="stopped")
    resumed = train(*words, "num_rounds=4", folder="stopped", resume=True)
    assert same_bits(whole.model, resumed.model)
    for row, twin in zip(whole.rows, resumed.rows, strict=True):
        assert row.get("bytes_down") == twin.get("bytes_down") and row.get("test_loss") == twin.get(
            "test_loss"
        )


def bytes_of(rows, way):
    return [row[f"bytes_{way}_by_role"] for row in rows if row["round"]]


def test_bytes_of_plain_averaging(train):
    """Queries and values of two layers have two factors each, and nothing of the base travels."""
    each = {"query": 2 * 2 * PAIR, "value": 2 * 2 * PAIR, "head": HEAD}
    run = train(*LORA)
    expected = [{role: 3 * size for role, size in each.items()}] * 3
    assert bytes_of(run.rows, "up") == expected == bytes_of(run.rows, "down")
    assert run.rows[1]["trained_params"] == 2 * 2 * 2 * RANK * WIDTH + HEAD // 4


def test_bytes_where_a_is_frozen(train):
    """A goes down once, and never up."""
    run = train(*LORA, "adapter.rule=ffa")
    half = {"query": 3 * 2 * PAIR, "value": 3 * 2 * PAIR, "head": 3 * HEAD}
    whole = {"query": 3 * 4 * PAIR, "value": 3 * 4 * PAIR, "head": 3 * HEAD}
    assert bytes_of(run.rows, "up") == [half] * 3
    assert bytes_of(run.rows, "down") == [whole, half, half]


@pytest.mark.parametrize("rule", ["fedex", "stack"])
def test_bytes_of_what_goes_into_the_base(train, rule):
    """Three clients of rank 2 at width 16 make factors of rank 6 or 8: 6 · 32 < 16 · 16 = 8 · 32. The second
    stack would be larger than the weight with the first, and the weight takes the place of both."""
    run = train(*LORA, f"adapter.rule={rule}")
    plain, dense = 2 * 2 * PAIR, 2 * WIDTH * WIDTH * 4
    factors = 2 * 6 * 2 * WIDTH * 4
    # After stacking, B is the zero that everybody holds and A is new.
    after = {"fedex": [plain + dense] * 2, "stack": [plain // 2 + factors, plain // 2 + dense]}[rule]
    down = bytes_of(run.rows, "down")
    assert [row["query"] for row in down] == [3 * size for size in (plain, *after)]
    assert [row["head"] for row in down] == [3 * HEAD] * 3
    assert [row["query"] for row in bytes_of(run.rows, "up")] == [3 * plain] * 3


def test_a_smaller_rank_sends_less_both_ways(train):
    words = [*LORA, "+adapter.ranks.0=1", "+adapter.ranks.2=1", "client.lr_schedule=constant"]
    run = train(*words)
    size = (1 + 2 + 1) * 2 * PAIR  # halves of two clients
    assert [row["value"] for row in bytes_of(run.rows, "up")] == [size] * 3
    assert [row["value"] for row in bytes_of(run.rows, "down")] == [size] * 3
    train(*words, "adapter.rule=ffa", "num_rounds=1", folder="stopped")
    again = train(*words, "adapter.rule=ffa", folder="stopped", resume=True)
    assert [row["value"] for row in bytes_of(again.rows, "down")] == [size, size // 2, size // 2]


def test_a_client_that_comes_late_is_sent_all_folds_and_others_the_new_one(train):
    """Two of three clients a round: whoever was away lacks the folds of the rounds between."""
    run = train(
        *LORA,
        "adapter.rule=stack",
        "participation=0.67",
        "num_rounds=4",
        "adapter.rank=1",
        "adapter.targets=value.0",
        "checkpoint.keep=9",
    )
    seen, sizes = {}, {}
    for row in run.rows[1:]:
        number, expected = row["round"], 0
        model = run.model_after(number - 1) if number > 1 else {}
        for client in row["clients"]:
            merged_deltas = [n for n in model if is_merged_delta(n) and n not in seen.get(client, ())]
            expected += sum(model[n].numel() * 4 for n in merged_deltas)
            expected += WIDTH * 4 + (0 if client in seen else WIDTH * 4)  # A, and at first B
            seen[client] = [n for n in model if is_merged_delta(n)]
        sizes[number] = expected
    assert {row["round"]: row["bytes_down_by_role"]["value"] for row in run.rows[1:]} == sizes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["adapter.rule=mean"], "Unknown adapter.rule 'mean': choose one of average, ffa, fedex, stack"),
        (["adapter.rank=17"], "adapter.rank=17 is more than"),
        (["adapter.rank=0"], "adapter.rank=0 is out of range"),
        (["adapter.targets=quary"], "adapter.targets names 'quary'"),
        (["adapter.layers=4-5"], "no projections for adapters"),
        (["+adapter.ranks.0=5"], "adapter.ranks.0=5 is out of range"),
        (["+adapter.ranks.9=1"], "adapter.ranks.9 is no client"),
        (["+adapter.ranks.0=1", "privacy=dp_sgd"], "unlike sizes"),
        (["adapter.rule=fedex", "server_optimizer=adam"], "server_optimizer=adam would make it another"),
        (["adapter.rule=stack", "aggregation=median"], "aggregation=median would make it another"),
        (
            [
                "adapter.rule=stack",
                "strategy=scaffold",
                "client=sgd",
                "client.momentum=0",
                "client.lr_schedule=constant",
            ],
            "strategy=scaffold would make it another",
        ),
        (["adapter.rule=fedex", "secure_aggregation=on"], "adapter.rule=fedex multiplies updates one by one"),
        (["adapter.path=/nowhere"], "adapter.path=/nowhere does not exist"),
        (["model.dtype=bfloat16"], "set client.precision=bf16, in which they meet (it is float32)"),
    ],
)
def test_what_cannot_work_is_one_sentence(train, words, said):
    with pytest.raises(UserError) as caught:
        train(*LORA, *words)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["strategy=pfeddc"], "leaves no place for adapter=lora"),
        (["model=linear"], "no projections for adapters"),
    ],
)
def test_models_without_a_place_for_adapters_are_said_too(train, words, said):
    with pytest.raises(UserError, match=said):
        train(*LORA, "num_rounds=1", *words, small=False)


@pytest.mark.parametrize(
    "words",
    [
        ["adapter.rule=average", "+adapter.ranks.1=1"],
        *slowly(["adapter.rule=ffa"]),
        ["adapter.rule=fedex", "participation=0.67", "num_rounds=5"],
        ["adapter.rule=stack", "participation=0.67", "num_rounds=5", "+adapter.ranks.1=1"],
        ["adapter.rule=stack", "strategy=fedfrozen", "strategy.warmup_rounds=2", "num_rounds=4"],
    ],
)
def test_bytes_are_foretold_to_the_byte(train, words):
    run = train(*LORA, *words)
    found = forecast(read(resolved(compose_config([*SMALL, *LORA, *words]))))
    assert [dict(row) for row in found.up_by_round] == bytes_of(run.rows, "up")
    assert [dict(row) for row in found.down_by_round] == bytes_of(run.rows, "down")
    whole = sum(value.numel() * 4 for value in run.model.values() if value.ndim)
    assert found.everything_up > 3 * whole  # the frozen weights are part of the whole model


# What goes together --------------------------------------------------------------------------------------


def shared_in(uploads, number):
    return {
        name
        for (server_round, _), (_, arrays) in uploads.items()
        if server_round == number
        for name in arrays
    }


def layers_in(names):
    return {found[1] for name in names if (found := re.search(r"layers?\.(\d+)\.", name))}


def kinds(names):
    return {"query" if ".q_proj." in name else "value" if ".v_proj." in name else "head" for name in names}


def test_fedfrozen_freezes_the_kernels_adapters_after_its_warm_up(train, uploads):
    run = train(*LORA, "strategy=fedfrozen", "strategy.warmup_rounds=1", "checkpoint.keep=9")
    assert kinds(shared_in(uploads, 1)) == {"query", "value", "head"}
    assert kinds(shared_in(uploads, 2)) == kinds(shared_in(uploads, 3)) == {"value", "head"}
    first, last = run.model_after(1), run.model_after(3)
    for name in first:
        assert torch.equal(first[name], last[name]) == (".q_proj." in name), name
    assert [row["stage"] for row in run.rows[1:]] == ["warmup", "frozen", "frozen"]


@pytest.mark.parametrize("rule", ["stack", *slowly("average")])
def test_safl_chooses_among_the_layers_that_have_adapters(train, uploads, rule):
    run = train(*LORA, f"adapter.rule={rule}", "strategy=safl", "strategy.top_k=1", "strategy.select=random")
    for (number, client), (_, arrays) in uploads.items():
        layers = layers_in(arrays)
        chosen = run.rows[number]["selection"][client]
        assert layers == {str(layer) for layer in chosen} and len(layers) == 1


def test_safl_takes_of_fewer_layers_where_fewer_have_adapters(train, uploads):
    train(*LORA, "strategy=safl", "strategy.top_k=1", "adapter.layers=1", "num_rounds=1")
    assert layers_in(shared_in(uploads, 1)) == {"1"}


def test_safl_scores_the_layers_with_adapters_alone(train, uploads):
    words = ["model.config.num_hidden_layers=3", "adapter.layers=1-2", "strategy.top_k=1", "num_rounds=1"]
    run = train(*LORA, "strategy=safl", *words)
    assert layers_in(shared_in(uploads, 1)) <= {"1", "2"} and len(run.rows[1]["layer_scores"]) == 2


@pytest.mark.parametrize("rule", ["ffa", *slowly("average", "stack")])
def test_differential_privacy_clips_and_noises_adapters_and_head_alone(train, rule):
    words = ["privacy=dp_sgd", "privacy.epsilon=5", "privacy.seeded_noise=true", f"adapter.rule={rule}"]
    run = train(*LORA, *words, "num_rounds=2")
    assert 0 < run.rows[-1]["epsilon_max"] <= 5 * 1.001
    names = set(filter(lora.is_adapter, run.model))
    assert names and all(value.isfinite().all() for value in run.model.values())


def test_both_ways_of_clipping_give_the_same(train):
    words = [*EXACT, "privacy=dp_sgd", "privacy.seeded_noise=true", "num_rounds=1"]
    one, other = (train(*words, f"privacy.clipping={c}", folder=c).model for c in ("per_example", "ghost"))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["strategy=fedprox", "strategy.mu=0.1", "adapter.rule=fedex"],
        ["strategy=fedprox", "strategy.mu=0.1", "adapter.rule=stack", "runtime.runner=cohort"],
        ["server_optimizer=adam", "adapter.rule=ffa"],
        ["server_optimizer=avgm"],
        ["aggregation=median"],
        ["strategy=scaffold", "client=sgd", "client.momentum=0", "client.lr_schedule=constant",
         "client.lr=0.05"],
        ["strategy=fedper", "adapter.rule=stack"],
        ["strategy=private_attention", "adapter.targets=all"],
        ["strategy=ditto", "client=sgd"],
        ["strategy=fedpart", "num_rounds=8"],
        ["secure_aggregation=on"],
        ["model=bert_tiny", "dataset=synthetic_clinical"],
    ],
)  # fmt: skip
def test_what_adapters_go_with_trains(train, words):
    small = [word for word in SMALL if "model.config" not in word] if "model=bert_tiny" in words else SMALL
    run = train(*small, *LORA, *words, small=False)
    assert run.rows[-1]["clients_ok"] == 3 and run.rows[-1]["train_loss"] < 10


@pytest.mark.slow
def test_a_base_in_bfloat16_under_adapters_in_float32(train):
    """Half the memory of the frozen weights; what trains and travels is what it was, and so are its bytes."""
    words = [*LORA, "client.precision=bf16", "client.lr=0.01", "checkpoint.keep=9"]
    coarse = [*words, "model.dtype=bfloat16"]
    fine, half = worker_of(*SMALL, *words).parameters, worker_of(*SMALL, *coarse).parameters
    trained = [name for name in half if lora.is_adapter(name) or name.startswith("classifier")]
    assert len(trained) == 2 * 4 + 2
    for name, value in half.items():
        assert value.dtype is (torch.float32 if name in trained else torch.bfloat16)
        assert torch.equal(value, fine[name].bfloat16().to(value.dtype)) or lora.is_adapter(name)
    whole, one, stacked = (
        train(*words, folder="whole"),
        train(*coarse, folder="one"),
        train(*coarse, "runtime.runner=cohort", folder="stacked"),
    )
    assert [row.get("bytes_up") for row in one.rows] == [row.get("bytes_up") for row in whole.rows]
    for name in trained:
        moved = float((one.model[name] - one.model_after(1)[name]).norm())
        assert moved and float((one.model[name] - stacked.model[name]).norm()) < moved
