"""Frozen dual encoders: CLIP, or any ViT beside any BERT, loaded by server and clients alike.

Prompts are inserted by hooks on the embedding layers, so that everything after them (masks, blocks, norms) is
the library's own forward, whatever the architecture.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPModel, PreTrainedTokenizerBase, VisionTextDualEncoderModel

from fedfrozen_app.core.digests import digest
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import InputShape
from fedfrozen_app.models.config_fit import check_image


@dataclass(frozen=True)
class Words:
    """The tokenised classes, with places for `count` prompt vectors from `start` on."""

    ids: Tensor  # (classes, tokens); at a prompt's places an arbitrary id, which is replaced
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
        """The module with the embeddings: some versions of CLIP's vision tower have an additional wrapper."""
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
        """(batch, patches, width): each patch is projected like the token of the whole image in `image`."""
        hidden = self.model.vision_model(pixel_values=pixel_values).last_hidden_state
        return self.model.visual_projection(self._pooled_tokens(hidden[:, 1:]))

    def _pooled_tokens(self, hidden: Tensor) -> Tensor:
        """(batch, tokens, vision width), each pooled like the tower's first token."""
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
        # The expanded mask, (classes, 1, tokens, tokens): transformers would read the values of a plain one,
        # which is impossible under vmap.
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
        """CoOp's texts, [start] P_1..P_count [class] . [end]; without prompt vectors, the template."""
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
    """A class name with spaces: folders have names like ice_cream."""
    return name.replace("_", " ").replace("-", " ").strip()


@contextmanager
def _inserted_words(embedding: nn.Module, words: Words, prompt: Tensor | None) -> Iterator[None]:
    """Within the block the prompt's vectors are inserted at the places reserved in `words`."""
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


def check_pictures(backbone: DualEncoder, shape: InputShape) -> None:
    """Raise a `UserError` for data other than images that this dual encoder can read."""
    if shape.task != "image":
        raise UserError("a dual encoder compares pictures with class names: choose an image dataset")
    check_image(backbone.config.vision_config, shape)


@lru_cache(maxsize=2)
def backbone_digest(backbone: DualEncoder) -> str:
    """One digest of everything that must be equal on both sides: all weights, and the text pooling."""
    found = hashlib.sha256(backbone.pooling.encode())
    for name, parameter in backbone.named_parameters():
        found.update(f"{name}:{digest(parameter)};".encode())
    return found.hexdigest()
