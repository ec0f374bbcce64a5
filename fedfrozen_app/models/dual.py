"""Frozen dual encoders: CLIP, or any ViT beside any BERT, loaded the same way on both sides.

Prompts enter by hooks on the embedding layers, so that everything behind them (masks, blocks, norms) is the
library's own forward, whatever the architecture. Where a folder was made by `fedfrozen align`, its
`alignment.json` says how texts are pooled and how pixels are normalised.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertConfig,
    ByT5Tokenizer,
    CLIPConfig,
    CLIPModel,
    PreTrainedTokenizerBase,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
    ViTConfig,
)
from transformers.utils import cached_file

from fedfrozen_app.data.table import InputShape
from fedfrozen_app.digests import digest
from fedfrozen_app.errors import UserError
from fedfrozen_app.models.quiet import quiet
from fedfrozen_app.models.transformer import check_image

log = logging.getLogger(__name__)

ALIGNMENT = "alignment.json"
PREPROCESSOR = "preprocessor_config.json"
DUAL = "vision-text-dual-encoder"
CLASSES: dict[str, Any] = {"clip": CLIPModel, DUAL: VisionTextDualEncoderModel}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json")


@dataclass(frozen=True)
class Words:
    """The classes as the text tower reads them, with room for `count` prompt vectors from `start` on."""

    ids: Tensor  # (classes, tokens); a prompt's places hold the id of some word, which is replaced
    mask: Tensor  # (classes, tokens) 1 for a token, 0 for padding
    start: int
    count: int

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def to(self, device: torch.device) -> "Words":
        return replace(self, ids=self.ids.to(device), mask=self.mask.to(device))


class DualEncoder(nn.Module):
    """A frozen image and a frozen text encoder into one space."""

    def __init__(
        self,
        model: CLIPModel | VisionTextDualEncoderModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        pooling: str | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
    ) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.config: Any = model.config
        self.tokenizer = tokenizer
        self.is_clip = model.config.model_type == "clip"
        self.pooling = pooling or ("last" if self.is_clip else "pooler")
        self.mean, self.std = mean, std

    @property
    def text_width(self) -> int:
        return int(self.config.text_config.hidden_size)

    @property
    def vision_width(self) -> int:
        return int(self.config.vision_config.hidden_size)

    @property
    def vision_depth(self) -> int:
        return int(self.config.vision_config.num_hidden_layers)

    @property
    def text_room(self) -> int:
        """How many tokens the text encoder can read."""
        return int(self.config.text_config.max_position_embeddings)

    @property
    def _vision(self) -> nn.Module:
        """The tower that has the embeddings: in some versions CLIP's has one more wrapper."""
        tower = self.model.vision_model
        return getattr(tower, "vision_model", tower)

    @property
    def _word_embedding(self) -> nn.Module:
        tower = getattr(self.model.text_model, "text_model", self.model.text_model)
        return getattr(tower.embeddings, "token_embedding", None) or tower.embeddings.word_embeddings

    def scale(self) -> Tensor:
        return self.model.logit_scale.exp()

    def image(self, pixel_values: Tensor, prompt: Tensor | None = None) -> Tensor:
        """(batch, channels, size, size) -> (batch, width); `prompt` is (depth, tokens, vision width)."""
        return self.model.visual_projection(self.pooled_image(pixel_values, prompt))

    def pooled_image(self, pixel_values: Tensor, prompt: Tensor | None = None) -> Tensor:
        with _inserted_images(self._vision, prompt):
            return self.model.vision_model(pixel_values=pixel_values).pooler_output

    def patches(self, pixel_values: Tensor) -> Tensor:
        """(batch, patches, width): each patch is read as `image` reads the token of the whole picture."""
        hidden = self.model.vision_model(pixel_values=pixel_values).last_hidden_state
        return self.model.visual_projection(self._pooled_tokens(hidden[:, 1:]))

    def _pooled_tokens(self, hidden: Tensor) -> Tensor:
        """(batch, tokens, vision width) as the tower pools its first token."""
        if (norm := getattr(self._vision, "post_layernorm", None)) is not None:
            return norm(hidden)
        if (pooler := getattr(self._vision, "pooler", None)) is not None:
            return pooler.activation(pooler.dense(hidden))
        return hidden

    def text(self, words: Words, prompt: Tensor | None = None) -> Tensor:
        """(classes, width); `prompt` is (tokens, text width)."""
        return self.model.text_projection(self.pooled_text(words, prompt))

    def pooled_text(self, words: Words, prompt: Tensor | None = None) -> Tensor:
        ids, mask = words.ids, words.mask
        # The mask as attention reads it, (classes, 1, tokens, tokens): transformers would look at the values
        # of a plain one, and under vmap it cannot look.
        seen = mask.bool()[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        if self.is_clip:
            seen = seen & torch.ones_like(seen).tril()
        with _inserted_words(self._word_embedding, words, prompt):
            output = self.model.text_model(input_ids=ids, attention_mask=seen)
        return self._pooled(output, mask)

    def _pooled(self, output: Any, mask: Tensor) -> Tensor:
        hidden = output.last_hidden_state  # (classes, tokens, text width)
        if self.pooling == "mean":
            weights = mask.to(hidden.dtype).unsqueeze(-1)
            return (hidden * weights).sum(dim=1) / weights.sum(dim=1)
        if self.pooling == "last":
            return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(dim=1) - 1]
        if getattr(output, "pooler_output", None) is None:
            raise UserError(
                "The text encoder has no pooler: align it with `fedfrozen align ... text_pooling=mean`."
            )
        return output.pooler_output

    def words(self, classes: tuple[str, ...], count: int, template: str) -> Words:
        """CoOp's texts, [start] P_1..P_count [class] . [end]; without prompt vectors the template's."""
        if count == 0:
            return self.sentences([template.replace("{}", spoken(name)) for name in classes])
        plain = self.sentences([f"{spoken(name)}." for name in classes])
        special = set(self.tokenizer.all_special_ids)
        start = 1 if int(plain.ids[0, 0]) in special else 0
        room = plain.ids[:, start : start + 1].expand(-1, count)
        ids = torch.cat([plain.ids[:, :start], room, plain.ids[:, start:]], dim=1)
        mask = torch.cat([plain.mask[:, :1].expand(-1, count), plain.mask], dim=1)
        return Words(ids, mask, start, count)

    def sentences(self, texts: list[str]) -> Words:
        encoded = self.tokenizer(texts, padding=True, return_attention_mask=True, return_tensors="pt")
        words = Words(encoded["input_ids"], encoded["attention_mask"], 0, 0)
        if words.length > self.text_room:
            raise UserError(
                f"The class names and the text around them take {words.length} tokens, but the text encoder "
                f"reads {self.text_room}: shorten them."
            )
        return words


def spoken(name: str) -> str:
    """A class name as one would say it: folders are called ice_cream."""
    return name.replace("_", " ").replace("-", " ").strip()


@contextmanager
def _inserted_words(embedding: nn.Module, words: Words, prompt: Tensor | None) -> Iterator[None]:
    """Within the block the prompt stands in the places that `words` keeps for it."""
    if prompt is None:
        yield
        return

    def replace(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        # (classes, tokens, width), with (count, width) for every class
        inserted = prompt.to(output.dtype).expand(output.shape[0], -1, -1)
        return torch.cat([output[:, : words.start], inserted, output[:, words.start + words.count :]], dim=1)

    handle = embedding.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _inserted_images(tower: nn.Module, prompt: Tensor | None) -> Iterator[None]:
    """Within the block the prompt's tokens follow the patches; a deeper prompt replaces them in its block."""
    if prompt is None:
        yield
        return
    tokens = prompt.shape[1]

    def append(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        inserted = prompt[0].to(output.dtype).expand(output.shape[0], -1, -1)
        return torch.cat([output, inserted], dim=1)  # (batch, 1 + patches + tokens, width)

    def renew(level: int) -> Callable[..., Any]:
        def replace(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden, *rest = inputs
            inserted = prompt[level].to(hidden.dtype).expand(hidden.shape[0], -1, -1)
            return (torch.cat([hidden[:, :-tokens], inserted], dim=1), *rest)

        return replace

    layers = next(module for module in tower.modules() if isinstance(module, nn.ModuleList))
    with ExitStack() as stack:
        handles = [tower.get_submodule("embeddings").register_forward_hook(append)]
        handles += [layers[level].register_forward_pre_hook(renew(level)) for level in range(1, len(prompt))]
        for handle in handles:
            stack.callback(handle.remove)
        yield


# Loading ----------------------------------------------------------------------------------------------------


def load_dual(
    *,
    source: str,
    path: str | None,
    model_type: str | None,
    config: Mapping[str, Any],
    dtype: str,
    seed: int,
) -> DualEncoder:
    """The backbone, on the CPU. The same settings give the same object: frozen, so all may share it."""
    if dtype not in DTYPES:
        raise UserError(f"the model's dtype is '{dtype}', but must be one of {', '.join(DTYPES)}")
    return _load(source, path, model_type, json.dumps(config, sort_keys=True), dtype, seed)


@lru_cache(maxsize=2)
def _load(
    source: str, path: str | None, model_type: str | None, config: str, dtype: str, seed: int
) -> DualEncoder:
    settings = json.loads(config)
    if source == "config":
        found = _from_config(model_type, settings, seed)
    elif source in ("checkpoint", "hub"):
        found = _from_folder(str(path), hub=source == "hub")
    else:
        raise UserError(
            f"model.source={source} gives no dual encoder: use model=dual_tiny, or model=checkpoint with the "
            "folder of a CLIP or a VisionTextDualEncoder."
        )
    for parameter in found.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    return found


def random_dual(model_type: str | None, settings: Mapping[str, Any]) -> Any:
    """A dual encoder with random weights, from torch's current seed."""
    try:
        if model_type == "clip":
            return CLIPModel(CLIPConfig(**settings))
        if model_type == DUAL:
            vision, text = (dict(settings[tower]) for tower in ("vision", "text"))
            joint = VisionTextDualEncoderConfig.from_vision_text_configs(
                ViTConfig(**vision), BertConfig(**text), projection_dim=settings["projection_dim"]
            )
            return VisionTextDualEncoderModel(joint)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"cannot build '{model_type}' from its configuration: {error}") from error
    raise UserError(f"model.model_type={model_type} is no dual encoder: choose {' or '.join(CLASSES)}.")


def _from_config(model_type: str | None, settings: Mapping[str, Any], seed: int) -> DualEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DualEncoder(random_dual(model_type, settings), ByT5Tokenizer())


def _from_folder(path: str, *, hub: bool) -> DualEncoder:
    options: dict[str, Any] = {"local_files_only": not hub, "trust_remote_code": False}
    try:
        kind = AutoConfig.from_pretrained(path, **options).model_type
        if kind not in CLASSES:
            raise UserError(
                f"{path} holds a '{kind}', which is no dual encoder: give a CLIP or a VisionTextDualEncoder, "
                "or make one with `fedfrozen align`."
            )
        with quiet(progress=hub):
            model = CLASSES[kind].from_pretrained(path, use_safetensors=True, **options)
        tokenizer = tokenizer_of(path, hub=hub)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the dual encoder '{path}': {' '.join(str(error).split())}") from error
    about, pixels = (_sidecar(path, name, hub=hub) for name in (ALIGNMENT, PREPROCESSOR))
    return DualEncoder(
        model,
        tokenizer,
        pooling=about.get("text_pooling"),
        mean=tuple(pixels["image_mean"]) if "image_mean" in pixels else None,
        std=tuple(pixels["image_std"]) if "image_std" in pixels else None,
    )


def tokenizer_of(path: str, *, hub: bool = False) -> PreTrainedTokenizerBase:
    """The folder's own; bytes (ByT5's numbering) where it has none."""
    if not hub and not any((Path(path) / name).exists() for name in TOKENIZER_FILES):
        return ByT5Tokenizer()
    return AutoTokenizer.from_pretrained(path, local_files_only=not hub)


def _sidecar(path: str, name: str, *, hub: bool) -> dict[str, Any]:
    """A JSON file beside the weights; empty where there is none."""
    file = cached_file(path, name, local_files_only=not hub, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(file).read_text()) if file else {}


def check_pictures(backbone: DualEncoder, shape: InputShape) -> None:
    """Refuse data that are not pictures this dual encoder can read."""
    if shape.task != "image":
        raise UserError("a dual encoder compares pictures with class names: choose an image dataset")
    check_image(backbone.config.vision_config, shape)


@lru_cache(maxsize=2)
def backbone_digest(backbone: DualEncoder) -> str:
    """One digest for all that both sides must hold alike: every weight, and how texts are pooled."""
    found = hashlib.sha256(backbone.pooling.encode())
    for name, parameter in backbone.named_parameters():
        found.update(f"{name}:{digest(parameter)};".encode())
    return found.hexdigest()
