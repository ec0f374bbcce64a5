"""Prompts with answers, or plain texts, for a language model: JSON lines, CSV or TSV."""

from __future__ import annotations

import logging
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, Frame, Rows, reads
from fedfrozen_app.data.sources.tabular import TEXT_FILES, is_scalar, pick, read_tables, text_frame

logger = logging.getLogger(__name__)
PROMPTS = ("prompt", "question", "instruction")
ANSWERS = ("answer", "response", "completion", "output", "text")
ONE_KIND = "text"  # what rows are dealt by where no column names their kind


@reads("language")
def read_instructions(spec: DatasetSpec) -> Found:
    """Files named by split, with a split column, or one a domain, as those of labelled texts."""
    return read_tables(spec, TEXT_FILES, text_frame, _found)


def _found(spec: DatasetSpec, train: Frame, test: Frame | None) -> Found:
    answer = pick(train, spec.answer_column, "dataset.answer_column", ANSWERS)
    prompt = None
    if spec.prompt_column is not None or any(name in train.cells for name in PROMPTS):
        prompt = pick(train, spec.prompt_column, "dataset.prompt_column", PROMPTS)
    else:
        logger.info("No column holds prompts: every token of %r is predicted.", answer)
    label = spec.label_column
    if label is not None:
        pick(train, label, "dataset.label_column", ())
    used = [name for name in (prompt, answer, label) if name is not None]
    absent = [] if test is None else [name for name in used if name not in test.cells]
    if absent:
        raise UserError(
            f"The test rows have no column {absent[0]!r}, which the train rows have: "
            "add it or set dataset.test_split to another split."
        )
    parts = [None if part is None else _rows(part, prompt, answer, label) for part in (train, test)]
    assert parts[0] is not None
    return Found("language", parts[0], parts[1])


def _rows(frame: Frame, prompt: str | None, answer: str, label: str | None) -> Rows:
    content: list[Any] = []
    for row, origin in enumerate(frame.origins):
        asked = "" if prompt is None else _text(frame.cells[prompt][row], prompt, origin)
        text = _text(frame.cells[answer][row], answer, origin)
        whole = text.strip() and (prompt is None or asked.strip())
        content.append((asked, text) if whole else None)
    kinds = [ONE_KIND] * len(content) if label is None else [_kind(value) for value in frame.cells[label]]
    others = {
        name: [value.strip() if isinstance(value, str) else value for value in values]
        for name, values in frame.cells.items()
        if name not in (prompt, answer) and is_scalar(values)
    }
    return Rows(content, kinds, others, frame.origins)


def _text(value: Any, column: str, origin: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(
            f"Column {column!r} holds a {type(value).__name__} in {origin}, and no text: correct it, or name "
            "another column with dataset.prompt_column and dataset.answer_column."
        )
    return value


def _kind(value: Any) -> str:
    return "none" if value is None or not str(value).strip() else str(value).strip()
