"""Sample predictions on a few test rows: a language model's texts before and after training, or masks.

The rows are from the server's test set, and the same for every run on these data.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fedfrozen_app.data.sources.text import with_padding
from fedfrozen_app.data.text_reading import tokenizer_for
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.report.mask_picture import FILE as MASKS
from fedfrozen_app.report.mask_picture import mask_picture
from fedfrozen_app.report.sample_texts import FILE, read_samples

PICTURES = 4
PROMPTS = 3
TOKENS = 32  # generated tokens per sample
OPENING = 8  # prompt tokens of a row without a prompt


def write_samples(worker: Worker, folder: Path, when: str) -> None:
    """Write samples.json or samples.png of the loaded model; `when` is "before" or "after". Does nothing for
    other models."""
    table = worker.data.test_table
    if worker.task.target.over_pixels and len(table):
        return write_masks(worker, folder) if when == "after" else None
    if worker.task.kind != "language" or not len(table):
        return
    tokenizer = with_padding(tokenizer_for(worker.config, worker.corpus.reading))
    found = [] if when == "before" else read_samples(folder)  # the folder may have another run's samples
    for number in range(min(PROMPTS, len(table))):
        ids, labels = (part[number].cpu() for part in (table.inputs["input_ids"], table.labels))
        real = int(table.inputs["attention_mask"][number].sum())
        begin = _opening(labels[:real])
        if number == len(found):
            found.append(
                {"prompt": _text(tokenizer, ids[:begin]), "answer": _text(tokenizer, ids[begin:real])}
            )
        found[number][when] = _text(tokenizer, greedy(worker, ids[:begin], tokenizer.eos_token_id))
    replace_file(folder / FILE, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def write_masks(worker: Worker, folder: Path) -> None:
    """samples.png: test images with true and predicted masks."""
    table = worker.data.test_table
    chosen = torch.linspace(0, len(table) - 1, min(PICTURES, len(table))).round().long()
    few = table.take(chosen)
    _, predicted = worker.task.predict(few)
    pictures = few.inputs["pixel_values"].cpu().numpy()
    mask_picture(pictures, few.labels.cpu().numpy(), predicted.cpu().numpy(), folder / MASKS)


def _opening(labels: Tensor) -> int:
    """The number of a row's prompt tokens; its first `OPENING` if it has no prompt."""
    counted = torch.nonzero(labels >= 0).flatten()
    first = int(counted[0]) if len(counted) else len(labels)
    return first if first > 1 else min(OPENING, max(len(labels) - 1, 1))


@torch.inference_mode()
def greedy(worker: Worker, prompt: Tensor, end: int | None) -> Tensor:
    """Greedy decoding, up to the end token or `TOKENS` tokens."""
    model: Any = worker.model
    reading = worker.corpus.reading
    room = reading.max_tokens if reading else TOKENS  # the model may not have more positions
    ids = prompt.to(worker.device)
    for _ in range(TOKENS):
        given = ids[None, -room:]
        scores = model(input_ids=given, attention_mask=torch.ones_like(given)).logits[0, -1]
        token = scores.argmax()
        if end is not None and int(token) == end:
            break
        ids = torch.cat([ids, token[None]])
    return ids[len(prompt) :]


def _text(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True)).strip()
