"""Bytes a round, role by role, against arithmetic on the shapes alone; and what freezing the kernel saves.

Four models train a few rounds of FedFrozen in process. What the run counted must equal, to the byte, what the
formulas below say from the sizes in the configuration. Nothing here is timed, and one repeat says it all.
"""

import csv
import io
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import show, write_result
from provenance import require_commit
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    ViTConfig,
)

from fedfrozen_app.config import compose_config, compose_run, quoted, resolved
from fedfrozen_app.exchange.count import bytes_by_role
from fedfrozen_app.exchange.role import KERNEL
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

Sizes = dict[str, int]  # role -> parameters
CLIENTS, ROUNDS, WARMUP = 3, 5, 2
FLOAT32 = 4
WIDTH = ("hidden_size", "num_hidden_layers", "intermediate_size")
TOKENS, CLASSES, VOCABULARY = 24, 2, 384  # of the text data below; bytes are numbered as ByT5 does
PUBLISHED = {"ViT-B/16": 16.4, "BERT-base": 12.9}  # per cent; freezing queries and keys can save no more


# Arithmetic ----------------------------------------------------------------------------------------------


def vit(d: int, layers: int, mlp: int, patch: int, *, side: int, channels: int, classes: int) -> Sizes:
    tokens = (side // patch) ** 2 + 1  # the patches and the class token
    square = layers * (d * d + d)
    return {
        "embedding": d + tokens * d + (channels * patch * patch * d + d),
        **dict.fromkeys(("query", "key", "value", "output"), square),
        "mlp": layers * (d * mlp + mlp + mlp * d + d),
        "norm": layers * 4 * d + 2 * d,
        "head": d * classes + classes,
    }


def bert(
    d: int, layers: int, mlp: int, *, vocabulary: int, positions: int, classes: int, types: int = 2
) -> Sizes:
    square = layers * (d * d + d)
    return {
        "embedding": (vocabulary + positions + types) * d,
        **dict.fromkeys(("query", "key", "value", "output"), square),
        "mlp": layers * (d * mlp + mlp + mlp * d + d),
        "norm": 2 * d + layers * 4 * d,
        "head": (d * d + d) + (d * classes + classes),  # pooler and classifier
    }


def llama(
    d: int, layers: int, mlp: int, *, heads: int, kv_heads: int, vocabulary: int, classes: int
) -> Sizes:
    narrow = layers * d * (d // heads * kv_heads)  # several query heads share a key and a value
    return {
        "embedding": vocabulary * d,
        "query": layers * d * d,
        "key": narrow,
        "value": narrow,
        "output": layers * d * d,
        "mlp": layers * 3 * d * mlp,
        "norm": layers * 2 * d + d,
        "head": d * classes,
    }


def gpt2(d: int, layers: int, *, vocabulary: int, positions: int, classes: int) -> Sizes:
    square = layers * (d * d + d)  # a third of the fused projection each
    return {
        "embedding": (vocabulary + positions) * d,
        **dict.fromkeys(("query", "key", "value", "output"), square),
        "mlp": layers * (d * 4 * d + 4 * d + 4 * d * d + d),
        "norm": layers * 4 * d + 2 * d,
        "head": d * classes,
    }


def expected(sizes: Sizes, server_round: int) -> tuple[Sizes, Sizes]:
    """Bytes up and down of one round, over all clients.

    In the first frozen round the kernel still goes down: the last warm-up round has just changed it.
    """
    whole = {role: FLOAT32 * CLIENTS * count for role, count in sizes.items()}
    rest = {role: count for role, count in whole.items() if role not in KERNEL}
    up = whole if server_round <= WARMUP else rest
    down = whole if server_round <= WARMUP + 1 else rest
    return up, down


# Runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    words: list[str]
    sizes: Sizes


def cases(texts: Path) -> Iterator[Case]:
    text = ["dataset=text", quoted("dataset.path", str(texts)), f"dataset.max_tokens={TOKENS}"]
    seen = {"vocabulary": VOCABULARY, "classes": CLASSES}
    width, patch = configured("vit_tiny"), configured("vit_tiny", "patch_size")
    digits = {"side": 8, "channels": 1, "classes": 10}
    yield Case("ViT", ["model=vit_tiny", "dataset=digits"], vit(*width, *patch, **digits))
    width = configured("bert_tiny")
    yield Case("BERT", [*text, "model=bert_tiny"], bert(*width, positions=TOKENS, **seen))
    grouped = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    yield Case("LLaMA", [*text, *model("llama", grouped)], llama(64, 2, 96, heads=4, kv_heads=2, **seen))
    fused = {"n_embd": 64, "n_layer": 2, "n_head": 4}
    yield Case("GPT-2", [*text, *model("gpt2", fused)], gpt2(64, 2, positions=TOKENS, **seen))


def configured(name: str, *keys: str) -> list[int]:
    """Sizes in conf/model/NAME.yaml: by default width, layers and the MLP's width."""
    config = resolved(compose_config([f"model={name}"]))["model"]["config"]
    return [config[key] for key in keys or WIDTH]


def model(model_type: str, config: Mapping[str, int]) -> list[str]:
    """A model that conf/ has no file for."""
    sizes = ",".join(f"{key}:{value}" for key, value in config.items())
    words = ["model=bert_tiny", f"model.name={model_type}_tiny", f"model.model_type={model_type}"]
    return [*words, "~model.config", f"+model.config={{{sizes}}}"]


def write_texts(path: Path) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("text", "label"))
        for number in range(90):
            label = "even" if number % 2 == 0 else "odd"
            rows.writerow((f"number {number:03d}, a sentence of some length", label))


def run(case: Case) -> list[dict[str, Any]]:
    words = [
        *case.words,
        *("strategy=fedfrozen", f"strategy.warmup_rounds={WARMUP}", f"num_rounds={ROUNDS}"),
        *("partition=iid", f"num_clients={CLIENTS}", "client.local_epochs=1", "client.local_steps=1"),
        "device=cpu",
    ]
    composed = compose_run(words)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        run_in_process(Job(composed, Path(folder) / "run"))
        rows = read_rows(Path(folder) / "run")
    return [compared(case, row) for row in rows if row["round"]]


def compared(case: Case, row: dict[str, Any]) -> dict[str, Any]:
    up, down = expected(case.sizes, row["round"])
    ways = {}
    for way, by_role in (("up", up), ("down", down)):
        counted = row[f"bytes_{way}_by_role"]
        ways[way] = {
            "expected": by_role,
            "counted": counted,
            "equal": counted == by_role,
            "text": row[f"bytes_{way}"] - sum(counted.values()),
        }
    return {"model": case.name, "round": row["round"], "stage": row["stage"], **ways}


def kernel_shares() -> dict[str, float]:
    """Per cent of a full-size model's parameters that queries and keys are; no weight is allocated.

    ViT-B/16 has its ImageNet head of 1000 classes; with 10 classes the share is 16.5 %.
    """
    with torch.device("meta"):
        models = {
            "ViT-B/16": AutoModelForImageClassification.from_config(ViTConfig(**labels(1000))),
            "BERT-base": AutoModelForSequenceClassification.from_config(BertConfig(**labels(CLASSES))),
        }
    shares = {}
    for name, found in models.items():
        sizes = bytes_by_role(dict(found.named_parameters()), roles_of(found))
        shares[name] = 100 * sum(sizes[role] for role in KERNEL) / sum(sizes.values())
    return shares


def labels(count: int) -> dict[str, Any]:
    return {"id2label": {number: str(number) for number in range(count)}}


def main() -> None:
    require_commit()
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.csv"
        write_texts(texts)
        found = [row for case in cases(texts) for row in run(case)]
    shares = kernel_shares()
    checks = {
        "bytes_by_role_equal_the_arithmetic": all(
            row[way]["equal"] for row in found for way in ("up", "down")
        ),
        "kernel_shares_as_published": {name: round(share, 1) for name, share in shares.items()} == PUBLISHED,
    }
    figures = {"rounds": found, "kernel_percent": shares}
    setting = {"clients": CLIENTS, "rounds": ROUNDS, "warmup_rounds": WARMUP}
    path = write_result("bytes", {"setting": setting, "figures": figures, "checks": checks})
    table = []
    for row in found:
        name = (row["model"], str(row["round"]), row["stage"])
        table.append((*name, *cells(row["up"]), *cells(row["down"])))
    columns = ("model", "round", "stage", "up", "expected", "text", "down", "expected", "text")
    show(f"Bytes of a round, {CLIENTS} clients", columns, table, checks, path)
    for model_name, share in shares.items():
        print(f"Queries and keys are {share:.1f} % of {model_name}.")


def cells(way: dict[str, Any]) -> tuple[str, str, str]:
    return f"{sum(way['counted'].values()):,}", f"{sum(way['expected'].values()):,}", f"{way['text']:,}"


if __name__ == "__main__":
    main()
