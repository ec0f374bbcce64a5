"""Alignment: moves the embeddings of a class's text and pictures together.

A step draws one template, encodes every class name in it, and minimizes the cross-entropy of
exp(s)·cos(image, text of the class). Only the two projections and the scale s are trained, on features that
are computed once; or everything is (`train="all"`), for encoders from scratch.
"""

import json
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn import functional

from fedfrozen_app.adapters.dual import DualEncoder, Words, spoken
from fedfrozen_app.adapters.dual_load import ALIGNMENT, PREPROCESSOR
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.client_splits import split_validation
from fedfrozen_app.models.silence_transformers import silence_transformers

log = logging.getLogger(__name__)
TEMPLATES = ("a photo of a {}.", "a picture of a {}.", "a {}.", "an image of the {}.", "this is a {}.")
MAX_SCALE = math.log(100.0)  # CLIP's own bound
CLEAR = 2.0  # multiple of chance level from which zero-shot counts as clearly better


@dataclass(frozen=True)
class AlignSettings:
    train: str = "projections"  # projections | all
    epochs: int = 60
    lr: float = 1e-3
    weight_decay: float = 0.01
    batch_size: int = 128
    held_out: float = 0.2  # share of the rows for evaluating the alignment
    seed: int = 0

    def checked(self) -> "AlignSettings":
        if self.train not in ("projections", "all"):
            raise UserError(f"train={self.train} is unknown: choose projections or all.")
        for key in ("epochs", "lr", "batch_size"):
            if getattr(self, key) <= 0:
                raise UserError(f"{key}={getattr(self, key)} must be above 0.")
        if not 0 < self.held_out < 1:
            raise UserError(f"held_out={self.held_out} must lie between 0 and 1.")
        return self


@dataclass(frozen=True)
class Pictures:
    """The rows to align on: pixels as bytes, and how to normalise them."""

    pixels: Tensor  # (rows, channels, size, size) uint8
    labels: Tensor  # (rows,)
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalised(self, rows: Tensor, device: torch.device) -> Tensor:
        mean, std = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (self.mean, self.std))
        return (self.pixels[rows].to(device).float() / 255 - mean) / std


def align(
    dual: DualEncoder, pictures: Pictures, settings: AlignSettings, device: torch.device
) -> dict[str, Any]:
    """Train `dual` in place; returns its metrics on held-out rows."""
    settings.checked()
    labels = pictures.labels.numpy()
    fit, held = split_validation(np.arange(len(labels)), labels, settings.held_out, (settings.seed,))
    if len(set(labels[fit])) < 2:
        raise UserError(f"The {len(fit)} rows to align on are of one class: raise dataset.align.")
    dual.to(device)
    learner = (
        _Projections(dual, pictures, device)
        if settings.train == "projections"
        else _Everything(dual, pictures, device)
    )
    metrics: dict[str, Any] = {
        "rows": len(fit),
        "held_out_rows": len(held),
        "chance": 1 / len(pictures.classes),
    }
    if isinstance(learner, _Projections):
        metrics["probe_accuracy"] = _probe(learner.images(torch.arange(len(labels))), labels, fit, held)
        log.info(
            "A linear probe of the image encoder reaches %.3f on held-out rows.", metrics["probe_accuracy"]
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        _fit(learner, torch.from_numpy(fit), pictures.labels, settings, device)
    with torch.no_grad():
        scores = learner.scores(torch.from_numpy(held), template=0)
    right = (scores.argmax(dim=1).cpu() == pictures.labels[torch.from_numpy(held)]).double().mean()
    metrics["zero_shot_accuracy"] = float(right)
    metrics["clearly_above_chance"] = metrics["zero_shot_accuracy"] >= CLEAR * metrics["chance"]
    if not metrics["clearly_above_chance"]:
        log.warning("Zero-shot is not clearly above chance: such a model cannot evaluate prompts.")
    dual.requires_grad_(False).eval().cpu()
    return metrics | {"settings": asdict(settings), "templates": list(TEMPLATES)}


class _Everything:
    """Trains all weights of both encoders."""

    def __init__(self, dual: DualEncoder, pictures: Pictures, device: torch.device) -> None:
        self.dual, self.pictures, self.device = dual, pictures, device
        names = [spoken(name) for name in pictures.classes]
        self.words = [_captions(dual, names, template, device) for template in TEMPLATES]
        self.parameters = list(dual.requires_grad_(True).parameters())

    def scores(self, rows: Tensor, template: int) -> Tensor:
        """(rows, classes)"""
        images = self.dual.image(self.pictures.normalised(rows, self.device))
        return _scores(self.dual, images, self.dual.text(self.words[template]))


class _Projections:
    """Freezes the encoders: their outputs are computed once, and the two projections are trained on them."""

    def __init__(self, dual: DualEncoder, pictures: Pictures, device: torch.device) -> None:
        self.dual = dual
        names = [spoken(name) for name in pictures.classes]
        dual.requires_grad_(False)
        with torch.no_grad():
            parts = torch.arange(len(pictures.labels)).split(256)
            self.features = torch.cat(
                [dual.pooled_image(pictures.normalised(rows, device)) for rows in parts]
            )
            words = [_captions(dual, names, template, device) for template in TEMPLATES]
            self.texts = [dual.pooled_text(word) for word in words]
        self.parameters = [
            dual.model.visual_projection.weight,
            dual.model.text_projection.weight,
            dual.model.logit_scale,
        ]
        for parameter in self.parameters:
            parameter.requires_grad_(True)

    def images(self, rows: Tensor) -> Tensor:
        return self.features[rows.to(self.features.device)]

    def scores(self, rows: Tensor, template: int) -> Tensor:
        images = self.dual.model.visual_projection(self.images(rows))
        return _scores(self.dual, images, self.dual.model.text_projection(self.texts[template]))


def _captions(dual: DualEncoder, names: list[str], template: str, device: torch.device) -> Words:
    return dual.sentences([template.format(name) for name in names]).to(device)


def _scores(dual: DualEncoder, images: Tensor, texts: Tensor) -> Tensor:
    return dual.scale() * functional.normalize(images, dim=-1) @ functional.normalize(texts, dim=-1).T


def _fit(learner: Any, rows: Tensor, labels: Tensor, settings: AlignSettings, device: torch.device) -> None:
    steps = settings.epochs * -(-len(rows) // settings.batch_size)
    optimizer = torch.optim.AdamW(learner.parameters, lr=settings.lr, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=settings.lr, total_steps=steps + 1)
    for _ in range(settings.epochs):
        for part in rows[torch.randperm(len(rows))].split(settings.batch_size):
            template = int(torch.randint(len(TEMPLATES), (1,)))
            loss = functional.cross_entropy(learner.scores(part, template), labels[part].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                learner.dual.model.logit_scale.clamp_(max=MAX_SCALE)


def _probe(features: Tensor, labels: np.ndarray, fit: np.ndarray, held: np.ndarray) -> float:
    """Logistic regression on the image encoder's output: an upper reference for the alignment."""
    found = functional.normalize(features, dim=-1).cpu().numpy()
    return float(
        LogisticRegression(C=100.0, max_iter=300)
        .fit(found[fit], labels[fit])
        .score(found[held], labels[held])
    )


def save(dual: DualEncoder, pictures: Pictures, metrics: dict[str, Any], folder: Path) -> None:
    """A folder for transformers' `VisionTextDualEncoderModel.from_pretrained`, and ours."""
    with silence_transformers():
        dual.model.save_pretrained(folder)
    if dual.tokenizer.vocab_files_names:
        dual.tokenizer.save_pretrained(folder)
    size = pictures.pixels.shape[-1]
    pixels = {"image_mean": pictures.mean, "image_std": pictures.std, "size": {"height": size, "width": size}}
    (folder / PREPROCESSOR).write_text(json.dumps(pixels, indent=2))
    (folder / ALIGNMENT).write_text(json.dumps({"text_pooling": dual.pooling, **metrics}, indent=2))
