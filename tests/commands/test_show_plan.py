"""What `plan` predicts is what the run then does, byte by byte; and it needs no weights."""

import json

import pytest
import torch
from safetensors.torch import load_file

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands.forecast import forecast
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.table import InputShape
from fedfrozen_app.models.build import build_model, outline_model
from fedfrozen_app.models.roles import roles_of
from tests.conftest import SMALL


@pytest.mark.parametrize(
    "words",
    [
        ["strategy=fedavg"],
        ["strategy=local"],
        [
            "strategy=fedfrozen",
            "strategy.warmup_rounds=2",
            "num_rounds=5",
            "num_clients=5",
            "participation=0.5",
        ],
        pytest.param(
            ["strategy=fedfrozen", "strategy.freeze_scope=random", "model.dtype=float64"],
            marks=pytest.mark.slow,
        ),
        ["strategy=safl", "strategy.select=fixed", "strategy.top_k=1", "model.config.num_hidden_layers=3"],
    ],
    ids=" ".join,
)
def test_the_run_sends_what_the_plan_said(train, words):
    found = forecast(read(resolved(compose_config([*SMALL, *words]))))
    rows = train(*words).rows[1:]
    assert [dict(part) for part in found.up_by_round] == [row["bytes_up_by_role"] for row in rows]
    assert [dict(part) for part in found.down_by_round] == [row["bytes_down_by_role"] for row in rows]
    told = [stage.name for stage in found.stages for _ in range(stage.rounds)]
    assert told == [row["stage"] for row in rows]
    trained = [stage.trained_params for stage in found.stages for _ in range(stage.rounds)]
    assert trained == [row["trained_params"] for row in rows]


def test_a_plan_of_prompts_aligns_no_encoders(monkeypatch):
    """What travels are the global prompts, 16 of width 64 for each encoder; two clients keep the rest."""
    monkeypatch.setattr("fedfrozen_app.align.tiny.align", None)
    words = ["strategy=pfeddc", "num_clients=2", "num_rounds=3", "strategy.text_tokens=4"]
    found = forecast(read(resolved(compose_config(words))))
    (stage,) = found.stages
    assert [dict(part) for part in found.up_by_round] == [{"prompt": 2 * (4 + 16) * 64 * 4}] * 3
    assert found.down_by_round == found.up_by_round
    assert stage.private["prompt"] == (4 + 16) * 64 * 4 and stage.private["fusion"] > 0


@pytest.mark.slow
def test_clients_that_choose_send_up_what_the_plan_said_and_get_no_more(train):
    words = ["strategy=safl", "strategy.top_k=1", "strategy.keep=0.5", "model.config.num_hidden_layers=3"]
    found = forecast(read(resolved(compose_config([*SMALL, *words]))))
    rows = train(*words).rows[1:]
    assert [dict(part) for part in found.up_by_round] == [row["bytes_up_by_role"] for row in rows]
    assert found.stages[0].trained_params == rows[0]["trained_params"]
    assert found.stages[0].up["mask"] == sum(row["bytes_up_by_role"]["mask"] for row in rows) > 0
    for told, row in zip(found.down_by_round, rows, strict=True):
        assert all(told[role] >= count for role, count in row["bytes_down_by_role"].items())


SHAPES = {
    "image": InputShape("image", ("a", "b"), channels=3, image_size=8),
    "text": InputShape("text", ("a", "b"), vocab_size=50, max_tokens=12),
}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
OTHER = {
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "dinov2": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4},
    "vit": {**SIZES, "patch_size": 4},
    "deit": {**SIZES, "patch_size": 4},
}


@pytest.mark.parametrize(
    "kind", ["vit", "deit", "dinov2", "bert", "distilbert", "roberta", "electra", "gpt2", "llama"]
)
def test_an_outline_is_the_model_without_its_weights(kind):
    shape = SHAPES["image" if kind in ("vit", "deit", "dinov2") else "text"]
    settings = {
        "source": "config",
        "path": None,
        "model_type": kind,
        "config": OTHER.get(kind, SIZES),
        "shape": shape,
        "dtype": "bfloat16",
    }
    outline, built = outline_model(**settings), build_model(**settings, seed=0)
    assert all(parameter.is_meta for parameter in outline.parameters())

    def facts(model):
        return {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}

    assert facts(outline) == facts(built)
    assert roles_of(outline) == roles_of(built)


def test_an_outline_of_a_checkpoint(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification

    BertForSequenceClassification(
        BertConfig(vocab_size=60, max_position_embeddings=20, pad_token_id=0, **SIZES)
    ).save_pretrained(tmp_path)
    settings = {"source": "checkpoint", "path": str(tmp_path), "model_type": None, "config": {}}
    outline = outline_model(**settings, shape=SHAPES["text"], dtype="float32")
    assert outline.get_parameter("bert.embeddings.word_embeddings.weight").shape == (60, 16)
    assert outline.classifier.weight.is_meta


LLAMA_1B = [
    *("model=bert_tiny", "model.model_type=llama", "~model.config.hidden_dropout_prob"),
    *("~model.config.attention_probs_dropout_prob", "model.dtype=bfloat16"),
    *("model.config.hidden_size=2048", "model.config.num_hidden_layers=16"),
    *("model.config.num_attention_heads=32", "+model.config.num_key_value_heads=8"),
    *("model.config.intermediate_size=8192", "+model.config.vocab_size=128256"),
]


def test_a_large_model_is_planned_without_its_memory(tmp_path, capsys):
    data = tmp_path / "texts.csv"
    data.write_text("text,label\n" + "".join(f"word {n},{n % 2}\n" for n in range(200)))
    words = ["dataset=text", f"dataset.path={data}", "num_clients=4", "num_rounds=10", *LLAMA_1B]
    words.append("strategy.warmup_rounds=5")
    assert command(["plan", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    # 128256·2048 embedding; 16 layers of 2·2048² + 2·2048·512 attention, 3·2048·8192 mlp; norms and head.
    assert found["parameters"]["embedding"] == 128256 * 2048
    assert found["parameters"]["query"] == found["parameters"]["output"] == 16 * 2048**2
    assert found["parameters"]["key"] == found["parameters"]["value"] == 16 * 2048 * 512
    assert found["parameters"]["mlp"] == 16 * 3 * 2048 * 8192
    warmup, frozen = found["stages"]
    kernel = 2 * 16 * 2048 * (2048 + 512)  # bytes, two a parameter
    assert sum(warmup["up"].values()) == 4 * 5 * sum(found["model"].values())
    assert sum(frozen["frozen"].values()) == kernel
    assert sum(frozen["up"].values()) == 4 * 5 * (sum(found["model"].values()) - kernel)
    # The last average of the kernel goes down once more, to each of the four.
    assert frozen["down"]["query"] + frozen["down"]["key"] == 4 * kernel


@pytest.mark.slow
def test_safl_is_planned_against_both_kinds_of_fedavg(capsys, monkeypatch):
    """A layer of LLaMA-1B has 60,821,504 parameters; 8 of 16 and little else go up."""
    monkeypatch.setenv("COLUMNS", "140")
    words = ["strategy=safl", "strategy.top_k=8", "num_clients=4", "num_rounds=2", *LLAMA_1B]
    assert command(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert "60.6% less than sending the whole model every time" in out
    monkeypatch.setenv("COLUMNS", "80")  # every figure whole on a plain terminal, too
    assert command(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert "│ mlp       │   805,306,368 │" in out and "│ all       │ 1,235,826,688 │" in out
    assert "50.0% less than sending all but the embeddings" in out
    assert command(["plan", "--json", *words, "strategy.keep=0.625"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    layers, rest = 16 * 60_821_504, 2048 + 6 * 2048  # final norm, and a head for the notes' six classes
    (stage,) = found["stages"]
    visits = stage["client_rounds"]
    assert found["but_embeddings_up"] == visits * 2 * (layers + rest)
    assert stage["up"]["mask"] == visits * layers / 2 / 8
    assert sum(stage["up"].values()) == visits * (layers / 2 * (0.625 * 2 + 1 / 8) + rest * 2)
    assert command(["plan", "num_rounds=2"]) == 0
    assert "all but the embeddings" not in capsys.readouterr().out  # fedfrozen sends them


@pytest.mark.slow
def test_the_plan_reads_as_tables(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert command(["plan", "num_rounds=10"]) == 0
    out = capsys.readouterr().out
    assert "warmup: 5 rounds" in out and "frozen: 5 rounds" in out and "12.0% less" in out
    assert "if it never does" not in out
    assert command(["plan", "num_rounds=10", "strategy.warmup_rounds=auto"]) == 0
    out = capsys.readouterr().out
    assert "warmup: 10 rounds" in out and "if it never does" in out
    assert command(["plan", "model=linear"]) == 2
    assert command(["plan", "model.dtype=int8"]) == 2
    assert torch.get_default_device() == torch.device("cpu")


@pytest.mark.parametrize("strategy", ["scaffold", "local_momentum"])
def test_the_client_state_of_the_plan_is_what_a_client_keeps(train, strategy, capsys, monkeypatch):
    words = [f"strategy={strategy}", "num_rounds=1"]
    found = forecast(read(resolved(compose_config([*SMALL, *words]))))
    kept = load_file(train(*words).folder / "checkpoints" / "1" / "clients.safetensors")
    clients = {name.partition("/")[0] for name in kept}
    planned = sum(found.stages[0].client_state.values())
    assert planned * len(clients) == sum(array.nbytes for array in kept.values()) > 0
    monkeypatch.setenv("COLUMNS", "200")
    assert command(["plan", *SMALL, *words]) == 0
    assert "client state" in capsys.readouterr().out


def test_a_method_that_sends_more_than_the_model_is_not_said_to_save(capsys):
    assert command(["plan", *SMALL, "strategy=scaffold", "num_rounds=1"]) == 0
    assert "Sent up: 100.0% more than sending the whole model every time." in capsys.readouterr().out
    assert command(["plan", *SMALL, "strategy=fedavg", "num_rounds=1"]) == 0
    assert "Sent up: as much as sending the whole model every time." in capsys.readouterr().out
