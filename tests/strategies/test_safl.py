"""SAFL's rounds: each client its own layers, merged by name, counted to the byte."""

import pytest
import torch
import transformers

from fedfrozen_app.config import AggregationConfig, compose_config, read, resolved
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources.synthetic import word_tokenizer
from fedfrozen_app.exchange.arrays import to_tensors
from fedfrozen_app.exchange.check import problem_of
from fedfrozen_app.exchange.choice import top_k
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.plan import layers_of
from fedfrozen_app.exchange.role import Role, is_embedding
from fedfrozen_app.exchange.train_request import NamedSettings, TrainRequest, read_train_request
from fedfrozen_app.handlers import train_handler
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.server.aggregate import RunningMean
from fedfrozen_app.server.base import Federation, PlannedFedAvg
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server.optimizer import NoOptimizer
from strategies.safl import SAFL, Settings
from tests.conftest import same_bits
from tests.server.wire import run_wired

LAYERS = 4
DIGITS = [
    "strategy=safl",
    "dataset=digits",
    "model=vit_tiny",
    f"model.config.num_hidden_layers={LAYERS}",
    "client.lr=0.01",
    "partition.alpha=0.3",
]


def a_model(layers=3):
    """A model of one number for each part: embedding, layers of two, final norm, head."""
    roles = {"embed": Role("embedding")}
    for layer in range(layers):
        roles |= {f"{layer}.query": Role("query", layer), f"{layer}.mlp": Role("mlp", layer)}
    roles |= {"norm": Role("norm"), "head": Role("head")}
    return {name: torch.zeros(1, dtype=torch.float64) for name in roles}, roles


def strategy(model, roles, **settings):
    made = SAFL(Federation(connect(None, roles)), Settings(**settings))  # type: ignore[arg-type]
    made.model = model
    return made


def test_robust_aggregation_needs_the_same_layers_from_all():
    _, roles = a_model()
    median = Federation(connect(None, roles), aggregation=AggregationConfig("median"))  # type: ignore[arg-type]
    for settings in (Settings(), Settings(select="fixed", zero_fill=True)):
        with pytest.raises(UserError, match="aggregation=median compares"):
            SAFL(median, settings)
    SAFL(median, Settings(select="fixed"))


# By hand --------------------------------------------------------------------------------------------------


def test_two_clients_with_overlapping_layers():
    model, _ = a_model()
    first = {"0.query": 3.0, "1.query": 1.0, "head": 1.0}  # layers 0 and 1, 100 rows
    second = {"1.query": 5.0, "2.query": 7.0, "head": 5.0}  # layers 1 and 2, 300 rows

    def merge(**options):
        mean = RunningMean(model, lambda name: None, **options)
        for values, weight in ((first, 100), (second, 300)):
            arrays = {name: torch.tensor([value], dtype=torch.float64) for name, value in values.items()}
            assert mean.add(arrays, weight) is None
        merged = NoOptimizer().step(model, mean.finish().model)
        return {name: value.item() for name, value in merged.items()}

    # 1.query and head: (100·1 + 300·5) / 400 = 4; the others come from one client each.
    assert merge() == {"0.query": 3.0, "1.query": 4.0, "2.query": 7.0, "head": 4.0}
    # Who did not send a layer counts as unchanged: 100·3/400 and 300·7/400.
    assert merge(zero_fill=True) == {"0.query": 0.75, "1.query": 4.0, "2.query": 5.25, "head": 4.0}


def test_the_plan_and_what_one_client_sends():
    safl = strategy(*a_model(), top_k=1)
    request = TrainRequest(1, safl.plan(1), {}, choice=safl.request(1, {}).choice, codec=("keep", 0.5))
    assert request.plan.shared == ("0.query", "0.mlp", "1.query", "1.mlp", "2.query", "2.mlp", "norm", "head")
    assert read_train_request(request.json) == request
    assert safl.client_plan(1).shared == ("2.query", "2.mlp", "norm", "head")
    assert safl.upload_bytes(1) == {"query": 8, "mlp": 8, "norm": 8, "head": 8}
    none = strategy(*a_model(), select="none")
    assert none.plan(1).trained == ("norm", "head") and none.request(1, {}).choice is None
    named = strategy(*a_model(), select="fixed", top_k=2, layers=[0, 2])
    assert layers_of(named.plan(1).trained, named.federation.roles) == [0, 2]
    last = strategy(*a_model(), select="fixed", top_k=2)
    assert layers_of(last.plan(1).trained, last.federation.roles) == [1, 2]
    for wrong in ([1], [1, 1], [2, 3]):
        with pytest.raises(UserError, match="must name 2 different layers"):
            strategy(*a_model(), select="fixed", top_k=2, layers=wrong)
    with pytest.raises(UserError, match="between 1 and the model's 3 layers"):
        strategy(*a_model(), top_k=4)


def test_replies_that_are_no_choice_of_layers_are_set_aside():
    model, roles = a_model()
    safl = strategy(model, roles, top_k=2)
    request = TrainRequest(1, safl.plan(1), {}, choice=safl.request(1, {}).choice)

    def problem(*names):
        arrays = {name: model.get(name, torch.zeros(1)) for name in names}
        return problem_of(Reply(request.digest, 1, arrays), request, model, roles)

    rest = ("norm", "head")
    assert problem("0.query", "0.mlp", "2.query", "2.mlp", *rest) is None
    assert "lacks 2.mlp" in problem("0.query", "0.mlp", "2.query", *rest)
    assert "lacks head" in problem("0.query", "0.mlp", "2.query", "2.mlp", "norm")
    assert "chose 1 layers where 2" in problem("0.query", "0.mlp", *rest)
    assert "chose 3 layers where 2" in problem(*request.plan.shared)
    assert "holds embed" in problem("embed", "0.query", "0.mlp", "2.query", "2.mlp", *rest)


# Real rounds ----------------------------------------------------------------------------------------------


def test_only_chosen_layers_move_and_travel(train):
    run = train(*DIGITS, "strategy.top_k=1", "num_rounds=2")
    roles = roles_in(run)
    before, after = run.model_after(1), run.model
    row = run.rows[-1]
    assert set(row["selection"]) == {"0", "1", "2"} and row["layers"] == list(range(LAYERS))
    assert all(len(layers) == 1 for layers in row["selection"].values())
    chosen = {layer for layers in row["selection"].values() for layer in layers}
    assert len(chosen) < LAYERS  # with three clients some layer is nobody's
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {
        name
        for name, role in roles.items()
        if role.layer in chosen or (role.layer is None and role.kind != "embedding")
    }
    layer = sum(after[name].nbytes for name, role in roles.items() if role.layer == 0)
    rest = sum(after[n].nbytes for n, role in roles.items() if role.layer is None and not is_embedding(role))
    assert sum(row["bytes_up_by_role"].values()) == 3 * (layer + rest)
    # Down came what round 1 changed: its chosen layers and the rest, to each of the three clients.
    earlier = {layer for layers in run.rows[1]["selection"].values() for layer in layers}
    assert sum(row["bytes_down_by_role"].values()) == 3 * (len(earlier) * layer + rest)
    assert row["trained_params"] == (layer + rest) // 4
    assert len(row["layer_scores"]) == LAYERS and all(0 < score < 1 for score in row["layer_scores"])


def test_scores_by_head_stay_with_the_client_and_say_what_it_chose(train, monkeypatch):
    seen = {}
    worker_for = train_handler.worker_for

    def watch(context):
        seen[str(context.node_config["partition-id"])] = context
        return worker_for(context)

    monkeypatch.setattr(train_handler, "worker_for", watch)
    run = train(*DIGITS, "strategy.top_k=2", "num_rounds=1")
    for client, layers in run.rows[-1]["selection"].items():
        scores = to_tensors(seen[client].state["scores"])["heads"]
        assert scores.shape == (LAYERS, 2)  # and heads
        assert list(top_k(scores.sum(dim=1), 2)) == layers


@pytest.mark.slow
def test_all_layers_are_fedavg_with_frozen_embeddings(train, monkeypatch):
    class FrozenEmbeddings(PlannedFedAvg):
        def plan(self, server_round):
            names = [name for name in self.model if "embeddings" in name]
            return super().plan(server_round).freeze(names)

    monkeypatch.setitem(registry.REGISTERED, ("strategies", "frozen_embeddings"), FrozenEmbeddings)
    other = [word for word in DIGITS if word != "strategy=safl"]
    plain = train("strategy=fedavg", *other, "strategy.name=frozen_embeddings", folder="plain")
    every = train(*DIGITS, f"strategy.top_k={LAYERS}", folder="every")
    assert same_bits(plain.model, every.model)
    assert same_bits(plain.model, train(*DIGITS, "strategy.select=all", folder="all").model)
    assert plain.rows[-1]["bytes_up_by_role"] == every.rows[-1]["bytes_up_by_role"]


@pytest.mark.slow
def test_the_wire_changes_nothing(train, tmp_path):
    words = [*DIGITS, "strategy.keep=0.625", "strategy.top_k=2", "num_rounds=2"]
    local, wired = train(*words), run_wired(tmp_path, extra=words)
    assert same_bits(local.model, wired.model)
    for one, other in zip(local.rows[1:], wired.rows[1:], strict=True):
        assert one["selection"] == other["selection"]
        assert one["bytes_up_by_role"] == other["bytes_up_by_role"] and one["bytes_up_by_role"]["mask"] > 0


def test_a_cohort_that_chooses_trains_one_by_one_and_says_so(train, caplog):
    caplog.set_level("INFO")
    words = [*DIGITS, "strategy.top_k=1", "num_rounds=1"]
    alone = train(*words, folder="alone")
    together = train(*words, "runtime.runner=cohort", folder="together")
    assert caplog.text.count("because each of them chooses its own layers") == 1
    assert same_bits(alone.model, together.model)


NOTES = ("dataset=synthetic_clinical", "model=bert_tiny", "num_rounds=1", "num_clients=2", "dataset.limit=60")


@pytest.mark.parametrize("tokens", ["101", "[a]", "[1.5]", "[true]"])
def test_tokens_that_are_no_ids_are_refused_before_the_run(tokens):
    with pytest.raises(UserError, match=r"strategy.tokens=.* list of token ids"):
        read(resolved(compose_config(["strategy=safl", f"strategy.tokens={tokens}"])))


@pytest.mark.parametrize("private", [(), ("privacy=dp_sgd", "client.local_steps=1")])
def test_tokens_that_cannot_be_there_are_refused(train, private):
    with pytest.raises(UserError, match=r"strategy.tokens names 999999, .* 0 to \d+"):
        train("strategy=safl", "strategy.tokens=[999999]", *NOTES, *private, small=False)


@pytest.mark.slow
def test_tokens_of_all_texts_are_refused_unless_that_would_tell_of_private_ones(train, caplog):
    """All ids but one: a private client that failed for want of that one would tell that no text has it."""
    words = word_tokenizer()
    some = [number for number in range(len(words)) if number != words.unk_token_id]
    given = ("strategy=safl", *NOTES, f"strategy.tokens={some}".replace(" ", ""))
    with pytest.raises(UserError, match="all the tokens there are"):
        train(*given, small=False)
    run = train(*given, "privacy=dp_sgd", "client.local_steps=1", small=False)
    assert run.rows[-1]["clients_ok"] == len(run.rows[-1]["clients"])
    assert "all the tokens there are" in caplog.text
    every = f"strategy.tokens={[*some, words.unk_token_id]}".replace(" ", "")
    with pytest.raises(UserError, match="every token id"):  # which can be said without a look at the texts
        train(*given[:-1], every, "privacy=dp_sgd", "client.local_steps=1", small=False, folder="every")


def test_tokens_that_no_text_has_choose_nothing_and_it_is_said(train, caplog):
    """All layers score 0, so that the last K are taken: not attention, and not in silence."""
    unused = word_tokenizer().unk_token_id  # all words are known
    train("strategy=safl", f"strategy.tokens=[{unused}]", *NOTES, small=False)
    assert "none of its profiled texts has a token of strategy.tokens" in caplog.text


@pytest.mark.slow
def test_random_layers_differ_by_client_and_round_and_repeat(train):
    words = [*DIGITS, "strategy.select=random", "strategy.top_k=2", "num_rounds=3"]
    one, two = (train(*words, folder=name) for name in "ab")
    seen = {tuple(layers) for row in one.rows[1:] for layers in row["selection"].values()}
    assert len(seen) > 1
    assert same_bits(one.model, two.model)
    fixed = train(*DIGITS, "strategy.select=fixed", "strategy.top_k=2", "num_rounds=1", folder="fixed")
    assert set(map(tuple, fixed.rows[1]["selection"].values())) == {(2, 3)}


@pytest.mark.slow
def test_layers_by_their_gradients(train):
    run = train(*DIGITS, "strategy.select=gradient", "strategy.top_k=1", "num_rounds=2")
    for row in run.rows[1:]:
        assert all(len(layers) == 1 for layers in row["selection"].values())
        assert sum(row["layer_scores"]) == pytest.approx(1)


def roles_in(run):
    settings = run.summary["config"]["model"]["config"]
    config = transformers.ViTConfig(**settings, image_size=8, num_channels=1, num_labels=10)
    with torch.device("meta"):
        return roles_of(transformers.ViTForImageClassification(config))


# Bytes ----------------------------------------------------------------------------------------------------


def on_meta(config, kind):
    with torch.device("meta"):
        model = kind(config)
    return dict(model.named_parameters()), roles_of(model)


def total(strategy):
    return sum(strategy.upload_bytes(1).values())


def test_a_24_layer_encoder_sends_a_third_and_pruned_a_quarter():
    config = transformers.BertConfig(
        num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096, num_labels=12
    )
    model, roles = on_meta(config, transformers.BertForSequenceClassification)
    full = sum(value.nbytes for value in model.values())
    frozen = total(strategy(model, roles, select="all"))
    head = total(strategy(model, roles, select="none"))
    some = total(strategy(model, roles, top_k=8))
    assert (some - head) * 3 == frozen - head  # of the layers exactly a third
    pruned = strategy(model, roles, top_k=8, keep=0.625)
    assert pruned.upload_bytes(1)["mask"] == (frozen - head) // 4 // 3 // 8
    # With mask and head: at least three quarters saved, against both kinds of FedAvg.
    assert total(pruned) < 0.25 * frozen < 0.25 * full


def test_llama_1b_sends_what_the_paper_says():
    config = transformers.LlamaConfig(
        **{"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "num_labels": 2},
    )
    model, roles = on_meta(config, transformers.LlamaForSequenceClassification)
    full = sum(value.nbytes for value in model.values())
    assert round(1 - total(strategy(model, roles, top_k=8)) / full, 3) == 0.606  # the paper's 60 %
    assert round(1 - total(strategy(model, roles, top_k=6)) / full, 3) == 0.705


def test_selection_travels_only_where_there_is_one():
    safl = strategy(*a_model())
    assert "selection" in TrainRequest(1, safl.plan(1), {}, choice=NamedSettings("random", {"top_k": 1})).json
    assert "selection" not in TrainRequest(1, safl.plan(1), {}).json
