"""Bytes saved by the freeze, against arithmetic on shapes, for four architectures from real checkpoints."""

import json

import pytest
import torch

from tests.conftest import SMALL, slowly
from tests.models.tiny_checkpoints import BERT, CLIENTS, GPT2, LAYERS, LLAMA, ROUNDS, D, checkpoint

FLOAT = 4


# Weights and biases of query and key in one layer.
KERNEL = {
    "vit": (D * D + D) + (D * D + D),
    "bert": (D * D + D) + (D * D + D),
    "llama": D * D + D * (D // 2),  # no biases; two of four heads share keys
    "gpt2": (D * D + D) + (D * D + D),  # two thirds of the fused projection
}


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "notes.jsonl"
    lines = [{"text": f"{'good' if n % 2 else 'bad'} note {n}", "label": n % 2} for n in range(90)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize("name", ["vit", *slowly("gpt2", "bert", "llama")])
def test_frozen_rounds_save_the_kernel_to_the_byte(train, texts, tmp_path, name):
    words = [f"num_rounds={ROUNDS}", "strategy.warmup_rounds=2", "client.weight_decay=0.1"]
    if name != "vit":
        folder = checkpoint({"bert": BERT, "llama": LLAMA, "gpt2": GPT2}[name], tmp_path / "checkpoint")
        words += ["dataset=text", f"dataset.path={texts}", "dataset.max_tokens=16", "partition=iid"]
        words += ["model=checkpoint", f"model.path={folder}", "checkpoint.keep=9"]
        words = [word for word in SMALL if not word.startswith("model.")] + words
    run = train(*words, "checkpoint.keep=9", small=name == "vit")
    kernel = KERNEL[name] * LAYERS * FLOAT * CLIENTS
    total = sum(value.numel() for value in run.model.values()) * FLOAT * CLIENTS
    up = [sum(row["bytes_up_by_role"].values()) for row in run.rows[1:]]
    down = [sum(row["bytes_down_by_role"].values()) for row in run.rows[1:]]
    assert up == [total, total, total - kernel, total - kernel]
    # From each node's second participation after the switch: the first brings the last averaged kernel.
    assert down == [total, total, total, total - kernel]
    for row in run.rows[3:]:
        assert not {"query", "key"} & set(row["bytes_up_by_role"])
        assert row["trained_params"] * FLOAT * CLIENTS == total - kernel
    if name == "gpt2":
        before, after = run.model_after(2), run.model
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        moved = {name.split(".")[-2] for name in changed if ".c_attn." in name}
        assert moved == {"value"}  # the value moves although it shares its tensor with query and key
