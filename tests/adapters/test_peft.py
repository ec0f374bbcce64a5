"""Adapters to peft and back: the same scores, whichever library computes them."""

import json
from functools import partial

import peft
import pytest
import torch
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)

from fedfrozen_app import commands
from fedfrozen_app.adapters import lora, peft_folder
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.models.export import export_model
from fedfrozen_app.models.roles import roles_of
from tests.conftest import slowly
from tests.models.conftest import SETTINGS, _build, _example, shape_of

RANK, ALPHA = 2, 3.0
AUTO = {"image": AutoModelForImageClassification, "text": AutoModelForSequenceClassification}


def adapt(family, targets, dtype="float32"):
    model = _build(family, dtype=dtype)
    given = {"rank": RANK, "scale": ALPHA / RANK, "dropout": 0.0, "seed": 1}
    lora.inject(model, roles_of(model), targets, None, **given)
    return model


def trained(family, targets, dtype="float32"):
    """Adapters and head as training might have left them; the base as it was."""
    model, generator = adapt(family, targets, dtype), torch.Generator().manual_seed(3)
    for name, role in roles_of(model).items():
        if role.adapter or role.kind == "head":
            value = model.get_parameter(name)
            value.data = torch.randn(value.shape, generator=generator, dtype=value.dtype) / 2
    return model


def scores(family, model):
    with torch.no_grad():
        return model(**_example(family, next(model.parameters()).dtype)).logits


def folds_for(model, ranks):
    """What rounds might have added to the first adapted projection, and the model with it."""
    path, generator = lora.adapted(dict(model.named_parameters()))[0], torch.Generator().manual_seed(5)
    draw = partial(torch.randn, generator=generator, dtype=next(model.parameters()).dtype)
    module = model.get_submodule(path)
    read, given = lora.sizes(module)
    found = {}
    for number, rank in enumerate(ranks, 1):
        found |= lora.merged_delta_of(number, path, draw(given, rank), draw(rank, read))
    if found:
        change = lora.sum_of(lora.merged_deltas_by_path(found)[path])
        module.weight.data = lora.added_to(module.weight.data, change, module)
    return found


@pytest.mark.parametrize("ranks", [(1, 2), *slowly((), (1, 9))])
@pytest.mark.parametrize("targets", [["query", "value"], ["all"]])
@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "vit"])
def test_peft_loads_the_folder_and_gives_the_same_scores(tmp_path, family, targets, ranks):
    classes = shape_of(family).classes
    export_model(_build(family, dtype="float64"), tmp_path / "base", classes)
    model = trained(family, targets, "float64")
    merged_deltas = folds_for(model, ranks)
    expected = scores(family, model)
    (tmp_path / "adapter").mkdir()
    given = {"rank": RANK, "alpha": ALPHA, "base": "", "base_path": None, "classes": classes}
    peft_folder.write(model, tmp_path / "adapter", merged_deltas=merged_deltas, **given)
    base = AUTO[shape_of(family).task].from_pretrained(tmp_path / "base", dtype=torch.float64)
    assert (scores(family, base) - expected).abs().max() > 1e-3
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(scores(family, loaded), expected, rtol=0, atol=1e-9)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(scores(family, merged), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", SETTINGS)
def test_a_folder_is_read_again(tmp_path, family):
    model = trained(family, ["query", "value"])
    given = {"rank": RANK, "alpha": ALPHA, "base": "x"}
    peft_folder.write(model, tmp_path, merged_deltas={}, base_path=None, classes=(), **given)
    other = adapt(family, ["query", "value"])
    names = peft_folder.read(other, str(tmp_path), **given)
    assert set(names) == {n for n, r in roles_of(other).items() if r.adapter or r.kind == "head"}
    torch.testing.assert_close(scores(family, other), scores(family, model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_folder_that_peft_wrote_is_read(tmp_path, family):
    """GPT-2's fused projection has one A there, which queries, keys and values share; another α is scaled."""
    export_model(_build(family), tmp_path / "base", shape_of(family).classes)
    base = AUTO["text"].from_pretrained(tmp_path / "base")
    targets = ["c_attn"] if family == "gpt2" else ["query", "key", "value"]
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=RANK, lora_alpha=7, target_modules=targets))
    generator = torch.Generator().manual_seed(0)
    for name, value in theirs.named_parameters():
        if "lora_" in name:
            value.data = torch.randn(value.shape, generator=generator)
    theirs.save_pretrained(tmp_path / "adapter")
    model = adapt(family, ["query", "key", "value"])
    peft_folder.read(model, str(tmp_path / "adapter"), rank=RANK, alpha=ALPHA, base="any")
    torch.testing.assert_close(scores(family, model), scores(family, theirs.eval()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 4}, "has adapters of rank 2, and adapter.rank=4: set adapter.rank=2"),
        ({"base": "y"}, "were trained on other frozen weights"),
    ],
)
def test_a_folder_that_does_not_fit_is_one_sentence(tmp_path, change, said):
    given = {"rank": RANK, "alpha": ALPHA, "base": "x"}
    peft_folder.write(
        trained("vit", ["value"]), tmp_path, merged_deltas={}, base_path=None, classes=(), **given
    )
    with pytest.raises(UserError, match=said):
        peft_folder.read(adapt("vit", ["value"]), str(tmp_path), **(given | change))
    with pytest.raises(UserError, match=r"has none for vit.*q_proj.*choose adapter\.targets"):
        peft_folder.read(adapt("vit", ["query", "value"]), str(tmp_path), **given)
    with pytest.raises(UserError, match="holds no adapter of peft's"):
        peft_folder.read(adapt("vit", ["value"]), str(tmp_path / "nothing"), **given)


# A whole run ---------------------------------------------------------------------------------------------

SIZES = ["model.config.hidden_size=16", "model.config.intermediate_size=32"]
SIZES += ["model.config.num_hidden_layers=2", "model.config.num_attention_heads=2"]
QUICK = ["num_clients=3", "dataset.limit=160", "partition.min_size=8", "client.local_epochs=1"]
QUICK += ["runtime.threads=1", "track.tensorboard=false", "runtime.runner=sequential"]


@pytest.fixture
def base(train, tmp_path, capsys):
    """A model that knows something, as a folder of transformers'."""
    run = train("strategy=fedavg", "num_rounds=1", folder="first")
    commands.dispatch(["export", str(run.folder), str(tmp_path / "model")])
    return tmp_path / "model"


@pytest.mark.parametrize(
    "rule", ["average", *(pytest.param(r, marks=pytest.mark.slow) for r in ("fedex", "stack"))]
)
def test_a_run_on_a_checkpoint_is_exported_and_goes_on_elsewhere(train, tmp_path, base, rule):
    words = ["strategy=fedavg", "adapter=lora", "adapter.rank=2", f"adapter.rule={rule}", *QUICK]
    words += ["model=checkpoint", f"model.path={base}"]
    run = train(*words, "num_rounds=2", folder="adapted", small=False)
    assert sum(value.numel() for value in run.model.values()) < 3000  # the base is not in it
    for extra in ([], ["--merge"]):
        commands.dispatch(["export", str(run.folder), str(tmp_path / f"out{len(extra)}"), *extra])
    theirs = AutoModelForImageClassification.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "out0").eval()
    merged = AutoModelForImageClassification.from_pretrained(tmp_path / "out1").eval()
    pixels = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(pixel_values=pixels).logits, merged(pixel_values=pixels).logits, rtol=0, atol=1e-6
        )
    assert json.loads((tmp_path / "out0" / "adapter_config.json").read_text())["base_model_name_or_path"]
    if rule == "average":
        again = train(*words, "num_rounds=0", f"adapter.path={tmp_path / 'out0'}", folder="b", small=False)
        assert again.rows[0]["test_loss"] == pytest.approx(run.rows[-1]["test_loss"], abs=1e-6)


def test_another_base_is_one_sentence_wherever_a_run_goes_on(train, tmp_path, base):
    from fedfrozen_app.launch import load_run

    words = ["strategy=fedavg", "adapter=lora", *QUICK, "model=checkpoint", f"model.path={base}"]
    run = train(*words, "num_rounds=1", folder="adapted", small=False)
    other = train("strategy=fedavg", "num_rounds=1", "seed=5", folder="second")
    commands.dispatch(["export", str(other.folder), str(base)])
    with pytest.raises(UserError, match="frozen weights here are not those"):
        train(*words, "num_rounds=2", folder="adapted", resume=True, small=False)
    with pytest.raises(UserError, match="frozen weights here are not those"):
        load_run(run.folder, [])


def test_a_plain_run_has_nothing_to_merge(train, tmp_path):
    run = train("strategy=fedavg", "num_rounds=1")
    with pytest.raises(UserError, match="has no adapters to merge"):
        commands.dispatch(["export", str(run.folder), str(tmp_path / "out"), "--merge"])
