"""Runs to export, and what their own model says of the test rows, for `plain_transformers.py`."""

import json

import torch
from PIL import Image
from safetensors.torch import save_file

from fedfrozen_app import commands
from fedfrozen_app.data.federated import dataset_of, spec_of
from fedfrozen_app.data.sources.images import open_image
from fedfrozen_app.data.sources.load import prepare
from fedfrozen_app.data.text_reading import tokenizer_for
from fedfrozen_app.launch import load_run
from fedfrozen_app.models.task import Batch
from fedfrozen_app.run.samples import OPENING, TOKENS

ROWS = 12
SIZES = ["model.config.hidden_size=16", "model.config.intermediate_size=32"]
SIZES += ["model.config.num_hidden_layers=2", "model.config.num_attention_heads=2"]
QUICK = ["num_clients=2", "num_rounds=1", "partition.min_size=2", "partition=iid", "client.local_epochs=1"]
QUICK += ["client.batch_size=16", "runtime.threads=1", "runtime.runner=sequential", "strategy=fedavg"]


def case_of(run, folder, place, *flags):
    """Export the run, and describe the folder, the raw test rows and the run's own scores of them."""
    place.mkdir(parents=True)
    commands.dispatch(["export", str(run.folder), str(folder), *flags])
    worker = load_run(run.folder, [])
    config, kind = worker.config, worker.task.kind
    raw = prepare(spec_of(dataset_of(config), None)).test
    if kind == "image":
        rows = []
        for number, item in enumerate(raw.content[:ROWS]):
            picture = item if isinstance(item, str) else place / f"{number}.png"
            open_image(item, "a row").save(picture)
            rows.append(str(picture))
    elif kind == "language":
        between = "\n" if config.dataset.separator is None else config.dataset.separator
        rows = [f"{prompt}{between}" if prompt else text for prompt, text in raw.content[:ROWS]]
    else:
        rows = list(raw.content[:ROWS])
    save_file(scores(worker), place / "expected.safetensors")
    adapter = worker.wrapper.merges and "--merge" not in flags
    return {
        "name": folder.name,
        "folder": str(folder),
        "kind": kind,
        "adapter": adapter,
        "base": config.model.path if adapter and config.model.source == "checkpoint" else None,
        "classes": list(worker.corpus.classes),
        "rows": rows,
        "expected": str(place / "expected.safetensors"),
        "mode": "L"
        if kind == "image" and worker.corpus.train.inputs["pixel_values"].shape[1] == 1
        else "RGB",
        "joined": tokenizer_for(config, worker.corpus.reading) is None,
        "written": written(run, rows) if kind == "language" else [],
        "new_tokens": TOKENS,
        "chunks": worker.corpus.reading.chunks if worker.corpus.reading else 1,
    }


def scores(worker):
    """By row: the run's own model on its own inputs, without padding."""
    found, inputs = {}, worker.data.test_table.inputs
    for number in range(min(ROWS, len(worker.data.test_table))):
        row = {name: value[number : number + 1] for name, value in inputs.items()}
        if "attention_mask" in row and row["attention_mask"].ndim == 2:
            length = int(row["attention_mask"].sum())
            row = {name: value[:, :length] for name, value in row.items()}
        with torch.no_grad():
            if row.get("input_ids", torch.zeros(1, 1)).ndim == 3:  # in chunks
                logits = worker.task.logits(worker.parameters, Batch(row, torch.zeros(1, dtype=torch.int64)))
            else:
                logits = worker.model(**worker.task.prepare(row)).logits
        found[str(number)] = logits[0].contiguous()
    return found


def written(run, rows):
    """What the run wrote after its first prompts; of a text without one, after its first tokens."""
    samples = json.loads((run.folder / "samples.json").read_text())
    return [
        (row, None if row.endswith("\n") else OPENING, sample["after"])
        for row, sample in zip(rows, samples, strict=False)
    ]


def colour_pictures(folder, count=24, side=20):
    """A folder of noisy pictures in two colours, larger than the model reads."""
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        name = ("red", "blue")[number % 2]
        pixels = torch.randint(0, 120, (side, side, 3), generator=generator, dtype=torch.uint8)
        pixels[..., 0 if name == "red" else 2] += 120
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.numpy()).save(folder / name / f"{number}.png")
    return folder
