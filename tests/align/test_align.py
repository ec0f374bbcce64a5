"""Alignment on real digits with real, tiny encoders: above chance, on rows that no run ever sees."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertModel, Dinov2Config, Dinov2Model, VisionTextDualEncoderModel

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.adapters.dual_load import load_dual
from fedfrozen_app.align.tiny import aligned_folder
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import align_rows, load_corpus, share_out

TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SLICE = ["dataset=digit_words", "dataset.align=0.3"]
FOUR = "dataset.keep_classes=[zero,one,two,three]"


@pytest.fixture
def parts(tmp_path):
    torch.manual_seed(0)
    vision = Dinov2Config(**TOWER, image_size=8, patch_size=2, num_channels=1, mlp_ratio=2)
    text = BertConfig(**TOWER, vocab_size=384, intermediate_size=32, max_position_embeddings=64)
    Dinov2Model(vision).save_pretrained(tmp_path / "vision")
    BertModel(text).save_pretrained(tmp_path / "text")
    return [f"vision={tmp_path}/vision", f"text={tmp_path}/text"]


@pytest.mark.slow
def test_two_strangers_meet_above_chance_and_train_on(parts, tmp_path, capsys, train):
    words = [*parts, *SLICE, FOUR, "train=all", "epochs=40", "batch_size=32", "lr=0.003"]
    words += ["projection_dim=16"]
    assert command(["align", str(tmp_path / "dual"), *words]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["zero_shot_accuracy"] > 2 * told["chance"]
    loaded = VisionTextDualEncoderModel.from_pretrained(tmp_path / "dual")  # transformers reads it too
    assert loaded.config.projection_dim == 16
    own = load_dual(
        source="checkpoint", path=str(tmp_path / "dual"), model_type=None, config={}, dtype="float32", seed=0
    )
    assert own.pooling == "mean" and own.mean is not None

    run = train(
        *["strategy=pfeddc", "model=checkpoint", f"model.path={tmp_path}/dual", "strategy.heads=2"],
        *[
            FOUR,
            "num_clients=2",
            "num_rounds=1",
            "runtime.threads=1",
            "client.local_steps=2",
            "personal=false",
        ],
        small=False,
    )
    assert run.rows[0]["val_accuracy"] > 0.3 and run.rows[1]["clients_failed"] == 0


def test_projections_alone_leave_the_encoders_as_they_were(parts, tmp_path, capsys):
    assert command(["align", str(tmp_path / "dual"), *parts, *SLICE, "epochs=2"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < told["probe_accuracy"] <= 1
    before = Dinov2Model.from_pretrained(tmp_path / "vision").state_dict()
    after = VisionTextDualEncoderModel.from_pretrained(tmp_path / "dual").vision_model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_the_slice_is_never_federated_and_fixed_for_every_seed():
    found = []
    for seed in (0, 1):
        config = read(resolved(compose_config([*SLICE, "strategy=fedavg", f"seed={seed}"])))
        corpus = load_corpus(config)
        rest, rows = align_rows(corpus, config)
        shares = share_out(corpus, config, 4)
        used = np.concatenate([*shares.partition.indices, shares.validation])
        assert not set(used) & set(rows) and sorted(used) == sorted(rest)
        found.append(rows)
    assert len(rows) == round(0.3 * len(corpus.train)) and np.array_equal(*found)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "Say where the dual encoder goes"),
        (["OUT", "vision=nowhere"], "vision=nowhere is no folder of a pretrained encoder"),
        (["OUT", *SLICE, "domain=photo"], "domain=photo is in no row"),
        (["OUT", "dataset=digit_words", "dataset.align=0"], "add dataset.align=0.2"),
        (["OUT", *SLICE, "text_pooling=max"], "text_pooling=max is unknown"),
        (["OUT", *SLICE, "train=none"], "train=none is unknown"),
        (["OUT", *SLICE, "epochs=many"], "epochs"),
        (["OUT", *SLICE, "projection_dim=0"], "projection_dim=0 must be"),
    ],
)
def test_bad_words_are_one_sentence(words, told, parts, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(["align", *words[:1], *parts, *words[1:]] if words else ["align"]) == 2
    assert told in capsys.readouterr().err


def save_pictures(folder, seed, mode="L"):
    rng = np.random.default_rng(seed)
    for name in ("cup", "ice_cream"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(20):
            pixels = Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8))
            pixels.convert(mode).save(folder / name / f"{number}.png")
    return ["strategy=pfeddc", "dataset=images", f"dataset.path={folder}", "dataset.align=0.3"]


@pytest.mark.slow
def test_pictures_that_do_not_fit_the_small_encoders_are_said_so(tmp_path, capsys, parts):
    words = save_pictures(tmp_path / "pictures", seed=0, mode="RGB")
    assert command([*words, "num_clients=2", f"output_dir={tmp_path}/run"]) == 2
    assert "dataset.channels=1" in capsys.readouterr().err
    assert command(["align", str(tmp_path / "dual"), *parts, *words[1:]]) == 2
    assert "dataset.channels=1" in capsys.readouterr().err


@pytest.mark.slow
def test_other_pictures_under_the_same_name_are_aligned_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))

    def folder_for(seed):
        config = read(resolved(compose_config(save_pictures(tmp_path / "pictures", seed))))
        return aligned_folder(config, load_corpus(config))

    first = folder_for(seed=0)
    assert folder_for(seed=0) == first and folder_for(seed=1) != first
