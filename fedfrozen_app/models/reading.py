"""Export a run's preprocessing of images and texts as files that transformers' `Auto...` classes read.

The written files are loaded again and compared with the run's own preprocessing: a folder that reads its
inputs differently would silently give wrong predictions.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    ViTImageProcessorPil,
)

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import format_error
from fedfrozen_app.models.silence_transformers import silence_transformers

BICUBIC = 3  # Pillow's constant
PROBES = (
    "A patient of 54 years.",
    "Größe: 1,75 m – naïve café, 東京 𝄞",
    "two  spaces and\ttabs\nand lines",
)
PIXEL_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Pictures:
    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Texts:
    tokenizer: PreTrainedTokenizerBase  # the run's own, with a padding token
    max_tokens: int
    kind: str  # the task: text, multilabel, tokens or language


def write_pictures(pictures: Pictures, folder: Path) -> None:
    """preprocessor_config.json: resize to the model's size, scale to 0..1, subtract mean, divide by std."""
    processor = ViTImageProcessorPil(
        do_convert_rgb=pictures.channels == 3,
        do_resize=True,
        size={"height": pictures.size, "width": pictures.size},
        resample=BICUBIC,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=list(pictures.mean),
        image_std=list(pictures.std),
    )
    processor.save_pretrained(folder)
    check_pictures(pictures, folder)


def check_pictures(pictures: Pictures, folder: Path) -> None:
    """Raise a `UserError` unless the written file gives the pixels that the run trained on."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, pictures.channels, pictures.size, pictures.size)
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    mean, std = (
        torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (pictures.mean, pictures.std)
    )
    expected = (pixels.double() / 255 - mean) / std
    with silence_transformers():
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    found = processor(images=list(pixels.numpy()), return_tensors="pt", input_data_format="channels_first")
    found = found["pixel_values"].double()
    most = PIXEL_TOLERANCE * float(expected.abs().max())
    if found.shape != expected.shape or float((found - expected).abs().max()) > most:
        raise UserError(
            "transformers' image processor does not give the pixels that this run trained on: use the run's "
            "model.safetensors."
        )


def write_tokenizer(texts: Texts, folder: Path, rows: Iterable[Sequence[int]] = ()) -> None:
    """The tokenizer's files. `rows`: token ids of some of the run's rows, for comparison."""
    plain_tokenizer(texts).save_pretrained(folder)
    check_tokenizer(texts, folder, rows)


def plain_tokenizer(texts: Texts) -> PreTrainedTokenizerBase:
    """A tokenizer that returns the run's token ids when called; for a language model, those of a prompt."""
    tokenizer = copy.deepcopy(texts.tokenizer)
    # A prompt is truncated and padded on the left, because generated text follows it.
    side = "left" if texts.kind == "language" else "right"
    settings: dict[str, Any] = {
        "model_max_length": texts.max_tokens,
        "padding_side": side,
        "truncation_side": side,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    tokenizer.init_kwargs |= settings
    if tokenizer.is_fast:
        backend: Any = tokenizer.backend_tokenizer
        backend.no_truncation()  # the last call has set it
        backend.no_padding()
        if texts.kind == "language":
            first, number = tokenizer.bos_token, tokenizer.bos_token_id
            marks = [] if number is None else [(first, number)]
            backend.post_processor = TemplateProcessing(
                single="$A" if number is None else f"{first} $A", special_tokens=marks
            )
    return tokenizer


def check_tokenizer(texts: Texts, folder: Path, rows: Iterable[Sequence[int]] = ()) -> None:
    """Raise a `UserError` unless the written tokenizer gives the run's token ids."""
    try:
        with silence_transformers():
            written = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unlike(f"transformers cannot load it ({format_error(error)})") from error
    decoded = [texts.tokenizer.decode(list(row), skip_special_tokens=True) for row in rows]
    for text in (*PROBES, *filter(None, decoded)):
        if written(text, verbose=False)["input_ids"] != _run_ids(text, texts):
            raise _unlike(f"of the text {text[:40]!r} it makes other tokens")
    if written.model_max_length != texts.max_tokens or written.pad_token_id != texts.tokenizer.pad_token_id:
        raise _unlike("it forgets its length or its padding token")


def _run_ids(text: str, texts: Texts) -> list[int]:
    tokenizer = texts.tokenizer
    if texts.kind != "language":
        return list(tokenizer(text, verbose=False)["input_ids"])
    first = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    return [*first, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def _unlike(why: str) -> UserError:
    return UserError(
        f"This run's tokenizer cannot be written as transformers would read it: {why}. Use the run's "
        "model.safetensors with the tokenizer of its model."
    )


def write_generation(model: Any, texts: Texts, folder: Path) -> None:
    """generation_config.json: the start, end and padding tokens, and the maximum length. Starts from a
    checkpoint's own file, if any."""
    tokenizer, config = texts.tokenizer, copy.deepcopy(model.generation_config or GenerationConfig())
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if tokenizer.eos_token_id not in known:
        config.eos_token_id = tokenizer.eos_token_id
    config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    if config.do_sample is None:
        config.do_sample = False  # as in the run's samples.json; a pipeline would draw
    if config.max_new_tokens is None and not model.name_or_path:
        config.max_length = texts.max_tokens  # a model from scratch has no positions beyond
    config.save_pretrained(folder)
