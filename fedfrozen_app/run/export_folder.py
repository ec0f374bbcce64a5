"""Export a run's final model as a folder that works without this package: weights, labels, preprocessing, and
a model card."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources.text import with_padding
from fedfrozen_app.data.text_reading import tokenizer_for
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.models.reading import Pictures, Texts, write_generation, write_pictures, write_tokenizer
from fedfrozen_app.models.spec import PRETRAINED
from fedfrozen_app.report.calibration import FILE as CALIBRATION
from fedfrozen_app.report.calibration import read_calibration, rule_for_export
from fedfrozen_app.report.loading_example import Exported
from fedfrozen_app.report.model_card import model_card

CARD = "README.md"
COMPARED = 32  # test rows on which the written tokenizer must match the run's


def write_export(worker: Worker, run: Path, folder: Path, *, merged: bool) -> None:
    """Write the folder. `merged`: one plain model; otherwise adapters for peft, if the run has some."""
    if worker.corpus.preprocessing is not None:
        raise UserError(
            "Plain transformers has no model that reads the columns of a table: use the run's "
            "model.safetensors, and "
            "its table.json for how cells become numbers."
        )
    if worker.task.target.over_pixels:
        raise UserError(
            "Plain transformers has no model of this run's kind that gives a class for each pixel: use the "
            "run's model.safetensors, or fedfrozen.load(RUN).model(), a torch module."
        )
    worker.export(folder, merged=merged)
    exported = _exported(worker, merged)
    if worker.task.kind == "image":
        exported = _with_pictures(exported, worker, folder)
    else:
        exported = _with_texts(exported, worker, folder)
    calibration = read_calibration(run)
    if calibration is not None:
        (folder / CALIBRATION).write_text(json.dumps(rule_for_export(calibration), indent=1) + "\n", "utf-8")
    (folder / CARD).write_text(model_card(run, exported), encoding="utf-8")


def _exported(worker: Worker, merged: bool) -> Exported:
    model, adapter = worker.config.model, worker.wrapper.merges and not merged
    counted = [
        value.numel()
        for name, value in worker.parameters.items()
        if adapter or not worker.roles[name].adapter
    ]
    return Exported(
        kind=worker.task.kind,
        model_class=type(worker.model).__name__,
        parameters=sum(counted),
        classes=worker.corpus.classes,
        adapter=adapter,
        base=model.path if adapter and model.source in PRETRAINED else None,
    )


def _with_pictures(exported: Exported, worker: Worker, folder: Path) -> Exported:
    _, channels, size, _ = worker.corpus.train.inputs["pixel_values"].shape
    mean, std = (tuple(worker.data_spec[name]) for name in ("mean", "std"))
    write_pictures(Pictures(channels, size, mean, std), folder)
    reads = (
        f"Pictures of {size} by {size} pixels, {'grey' if channels == 1 else 'RGB'}: others are resized "
        f"(bicubic). Of pixels in 0..1 the mean {_numbers(mean)} is subtracted, and the rest divided "
        f"by {_numbers(std)}. `preprocessor_config.json` says so to `AutoImageProcessor`."
    )
    return replace(exported, reads=reads, grey=channels == 1)


def _with_texts(exported: Exported, worker: Worker, folder: Path) -> Exported:
    config, kind, reading = worker.config, worker.task.kind, worker.corpus.reading
    assert reading is not None
    own = tokenizer_for(config, reading)
    texts = Texts(with_padding(own), reading.max_tokens, kind)
    if own is None and config.model.source in PRETRAINED:
        _check_reads_bytes(worker, texts)
    inputs = {name: value[:COMPARED].flatten(0, -2) for name, value in worker.corpus.test.inputs.items()}
    rows = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    write_tokenizer(texts, folder, rows)
    where = folder / "base" if exported.adapter else folder
    if kind == "language" and exported.base is None:
        write_generation(worker.model, texts, where)
    named = "bytes" if own is None else f"tokens, out of {len(texts.tokenizer):,}"
    cut = "cut at their beginning" if kind == "language" else "cut, with `truncation=True`"
    reads = (
        f"Texts as {named}, at most {texts.max_tokens:,} of them: longer ones are {cut}. "
        "`AutoTokenizer` reads its files from this folder."
    )
    if reading.chunks > 1:
        reads += (
            f" A text is read in up to {reading.chunks} such chunks, and its scores are the mean of theirs: "
            "a pipeline would read the first alone."
        )
    separator = _separator(worker) if kind == "language" else ""
    if separator:
        reads += f" A prompt ends with {separator!r}, and the answer follows."
    return replace(
        exported,
        reads=reads,
        joins_words=own is None,
        separator=separator,
        chunks=reading.chunks,
        new_tokens=max(1, min(32, texts.max_tokens // 2)),
    )


def _check_reads_bytes(worker: Worker, texts: Texts) -> None:
    model: Any = worker.model
    if model.config.vocab_size != len(texts.tokenizer):
        raise UserError(
            f"{worker.config.model.path} holds no tokenizer, and its {model.config.vocab_size:,} tokens are "
            "no bytes: put back the tokenizer's files that were there when the run trained."
        )


def _separator(worker: Worker) -> str:
    """The separator between prompt and answer; "" if rows have no prompt."""
    dataset = worker.config.dataset
    counted = worker.corpus.test.labels >= 0  # from a row's second token on, if it has no prompt
    has_prompts = dataset.prompt_column is not None or bool((~counted[:, 1]).any())
    between = "\n" if dataset.separator is None else dataset.separator
    return between if has_prompts else ""


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4g}" for value in values)
