"""A frozen dual encoder with learned prompts: global ones, local ones, and their fusion.

Bottom up: prompts (`PromptSet`), their fusion (`CrossFusion`), and the classifier that inserts the fused
prompts into the frozen encoders (`PromptedDual`). A run trains only prompts and fusion; server and clients
each load the encoders, so these are never sent.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfrozen_app.adapters.dual import DualEncoder, Words, check_pictures
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import InputShape
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.models.roles import roles_of

STD = 0.02  # of newly initialised prompts


class CrossFusion(nn.Module):
    """Cross-attention between prompts: W_O · MHA(Q = of W_Q, K = by W_K, V = by W_V), with W_O = 0 initially.

    Implemented here, because torch's module keeps query, key and value in one tensor and has biases.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        nn.init.zeros_(self.output.weight)

    def forward(self, of: Tensor, by: Tensor) -> Tensor:
        # (depth, tokens, width) -> (depth, heads, tokens, width / heads)
        query, key, value = (
            project(source).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for project, source in ((self.query, of), (self.key, by), (self.value, by))
        )
        weights = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(dim=-1)
        return self.output((weights @ value).transpose(-2, -3).flatten(-2))


class PromptSet(nn.Module):
    """The prompts of one tower by level, (depth, tokens, width) each."""

    def __init__(self, design: Any, depth: int, tokens: int, width: int) -> None:
        super().__init__()
        for level in design.levels:
            self.register_parameter(level, nn.Parameter(STD * torch.randn(depth, tokens, width)))

    def forward(self, design: Any, fusion: CrossFusion | None, only_global: bool) -> Tensor:
        """The tower's input prompt, from the global prompt G and the local one L:

        cross: G + W_O·MHA(G, L), or with the local prompt as query G + W_O·MHA(L, G);
        sum: G + L; concat: [G; L].
        """
        if design.prompts != "both" or only_global:
            return getattr(self, "global" if only_global else design.prompts)
        shared, local = getattr(self, "global"), getattr(self, "local")  # noqa: B009 - one is a keyword
        if design.fusion == "concat":
            return torch.cat([shared, local], dim=-2)
        if fusion is None:
            return shared + local
        return shared + (fusion(shared, local) if design.fusion_query == "global" else fusion(local, shared))


def full_precision(like: Tensor) -> torch.autocast:
    """Context in which prompts, fusion and scores keep their type while the encoders are cast to bf16."""
    return torch.autocast(like.device.type, enabled=False)


class Scores(NamedTuple):
    logits: Tensor


class PromptedDual(nn.Module):
    """Class scores: exp(scale) · cosine(image, text of the class), called like an image classifier.

    Methods with other prompts or scores are subclasses. `design` is one of adapters/design.py.
    """

    Prompts: ClassVar[type[PromptSet]] = PromptSet

    def __init__(self, backbone: DualEncoder, design: Any, classes: tuple[str, ...]) -> None:
        super().__init__()
        self.config = backbone.config
        self.design = design
        self.backbone = backbone
        widths = {"text": backbone.text_width, "vision": backbone.vision_width}
        tokens = {"text": design.text_tokens, "vision": design.vision_tokens}
        depth = {"text": 1, "vision": design.depth}
        _check_fit(design, widths, backbone.vision_depth)
        self.prompts = nn.ModuleDict(
            {t: self.Prompts(design, depth[t], tokens[t], widths[t]) for t in design.towers}
        )
        self.fusion = nn.ModuleDict(
            {t: CrossFusion(widths[t], design.heads) for t in design.towers if design.fused}
        )
        self._words = self._words_of(classes)
        self._only_global = False
        self._texts: tuple[object, Tensor] | None = None  # texts of unchanged prompts, with versions
        self._fixed_texts: Tensor | None = None  # if no text prompt is learned
        self._start = {n: p.detach().clone() for n, p in self.named_parameters() if n.endswith(".local")}

    def _words_of(self, classes: tuple[str, ...]) -> dict[int, Words]:
        """Tokenised classes by the number of prompt vectors before the names."""
        own, room = self.design.text_tokens, self.backbone.text_room
        counts = {0, own, 2 * own} if "text" in self.design.towers else {0}
        found = {count: self.backbone.words(classes, count, self.design.template) for count in counts}
        if (longest := max(words.length for words in found.values())) > room:
            raise UserError(
                f"Prompts and class names take {longest} tokens, but the text encoder reads {room}: lower "
                f"{self.design.within}text_tokens."
            )
        return found

    def train(self, mode: bool = True) -> Self:
        """Set the mode, except of the encoders: dropout in a frozen encoder would only add noise."""
        super().train(mode)
        self.backbone.eval()
        self._texts = None
        return self

    def settle(self) -> None:
        """Precompute what does not depend on prompts. Call it when the model is on its device."""
        device = self.backbone.scale().device
        self._words = {count: words.to(device) for count, words in self._words.items()}
        if "text" not in self.design.towers:
            with torch.no_grad():
                self._fixed_texts = self._encode_texts()

    def roles(self) -> dict[str, Role]:
        """The roles of prompts and fusion, by tower, followed by those of the frozen encoders."""
        inner = self._encoder_roles()
        found = {}
        for name, _ in self.named_parameters():
            part, _, rest = name.partition(".")
            if part in ("prompts", "fusion"):
                found[name] = Role(part.removesuffix("s"), tower=rest.partition(".")[0])
            else:
                # The two projections and the scale are in no tower's role table.
                found[name] = inner.get(name.removeprefix("backbone.model."), Role("head"))
        return found

    def _encoder_roles(self) -> dict[str, Role]:
        encoders = self.backbone.model
        if self.backbone.is_clip:
            return roles_of(encoders)
        return {
            f"{tower}_model.{name}": replace(role, tower=tower)
            for tower in ("vision", "text")
            for name, role in roles_of(encoders.get_submodule(f"{tower}_model")).items()
        }

    @property
    def frozen_names(self) -> frozenset[str]:
        """The parameters that every side loads for itself: neither sent nor trained."""
        return frozenset(name for name, _ in self.named_parameters() if name.startswith("backbone."))

    @property
    def images_are_fixed(self) -> bool:
        """Whether an image's features never change, because there are no vision prompts."""
        return "vision" not in self.design.towers

    @contextmanager
    def only_global(self) -> Iterator[None]:
        """Context in which the model is the server's: without local prompts."""
        self._only_global = "global" in self.design.levels
        try:
            yield
        finally:
            self._only_global = False

    @contextmanager
    def reading(self, classes: tuple[str, ...]) -> Iterator[None]:
        """Context in which the model predicts among these classes: prompts work with any class name."""
        before, fixed = self._words, self._fixed_texts
        self._words, self._texts = self._words_of(classes), None
        self.settle()
        try:
            yield
        finally:
            self._words, self._fixed_texts, self._texts = before, fixed, None

    def forward(self, pixel_values: Tensor | None = None, image_features: Tensor | None = None) -> Scores:
        if image_features is None:
            assert pixel_values is not None
            image_features = self.encode_images(pixel_values)
        texts, scale = self.text_features(), self.backbone.scale()
        with full_precision(scale):
            return Scores(self.scores(image_features.to(scale.dtype), texts.to(scale.dtype), scale))

    def scores(self, pictures: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        """(batch, width) · (classes, width)ᵀ -> (batch, classes)."""
        return scale * pictures @ texts.T

    def encode_images(self, pixel_values: Tensor) -> Tensor:
        """(batch, width), each of length 1."""
        prompt = self._prompt("vision") if "vision" in self.design.towers else None
        return functional.normalize(self.backbone.image(pixel_values, prompt), dim=-1)

    def text_features(self) -> Tensor:
        """(classes, width), once per class set, whatever the batch; cached if no text prompt trains."""
        if self._fixed_texts is not None:
            return self._fixed_texts
        if self.training or torch.is_grad_enabled():
            return self._encode_texts()
        # In-place changes increment a tensor's version.
        learned = [p for module in (self.prompts, self.fusion) for p in module.parameters()]
        key = (self._only_global, *(p._version for p in learned))
        if self._texts is None or self._texts[0] != key:
            self._texts = (key, self._encode_texts())
        return self._texts[1]

    def _encode_texts(self) -> Tensor:
        prompt = self._prompt("text")[0] if "text" in self.design.towers else None  # (tokens, width)
        words: Words = self._words[0 if prompt is None else prompt.shape[-2]]
        return functional.normalize(self.backbone.text(words, prompt), dim=-1)

    def _prompt(self, tower: str) -> Tensor:
        fusion = self.fusion[tower] if self.design.fused else None
        with full_precision(self.backbone.scale()):
            return self.prompts[tower](self.design, fusion, self._only_global)

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """The distance of the fused prompt to the global one, and the change of local prompts."""
        found: dict[str, float] = {}
        for tower in self.design.towers:
            local = getattr(self.prompts[tower], "local", None)
            if local is not None:
                start = self._start[f"prompts.{tower}.local"].to(local.device)
                found[f"local_moved_{tower}"] = float((local - start).norm() / start.norm())
            if local is not None and self.design.prompts == "both" and self.design.fusion != "concat":
                shared = getattr(self.prompts[tower], "global")
                gap = self._prompt(tower) - shared
                found[f"fusion_gap_{tower}"] = float(gap.norm() / shared.norm())
        return found


def _check_fit(design: Any, widths: Mapping[str, int], vision_depth: int) -> None:
    if design.depth > vision_depth:
        raise UserError(
            f"{design.within}depth={design.depth} is more than the {vision_depth} layers of the vision "
            "encoder: lower it."
        )
    for tower in design.towers if design.fused else ():
        if widths[tower] % design.heads:
            raise UserError(
                f"{design.within}heads={design.heads} does not divide the prompts' width {widths[tower]}: "
                "choose one that does."
            )


def build_prompted(
    backbone: DualEncoder,
    design: Any,
    *,
    shape: InputShape,
    seed: int,
    reading: type[PromptedDual] = PromptedDual,
) -> PromptedDual:
    """A frozen dual encoder with fresh prompts, in eval mode; the same seed gives the same bits."""
    check_pictures(backbone, shape)
    dtype = backbone.scale().dtype
    if dtype == torch.bfloat16:
        raise UserError(
            "prompts train in float32: use client.precision=bf16 in place of model.dtype=bfloat16"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = reading(backbone, design, shape.classes)
    for name, parameter in model.named_parameters():
        if name not in model.frozen_names:
            parameter.data = parameter.data.to(dtype)
    return model.eval()
