"""`fedfrozen align`: two pretrained encoders become a dual encoder for `model=checkpoint`."""

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import AutoConfig, AutoModel, VisionTextDualEncoderConfig, VisionTextDualEncoderModel

from fedfrozen_app.adapters.dual import DualEncoder, check_pictures
from fedfrozen_app.adapters.dual_load import tokenizer_of
from fedfrozen_app.align.tiny import pictures_of
from fedfrozen_app.align.train import AlignSettings, Pictures, align, save
from fedfrozen_app.config import compose_run, device_of, sentence
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.federated import align_rows, input_shape, load_corpus
from fedfrozen_app.files.disk import whole_folder
from fedfrozen_app.files.kinds import check_is_neither
from fedfrozen_app.models.silence_transformers import silence_transformers

log = logging.getLogger(__name__)
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
USAGE = (
    "fedfrozen align OUT vision=DIR text=DIR dataset=... dataset.path=DIR dataset.align=SHARE "
    "[text_pooling=mean|pooler projection_dim=N train=projections|all epochs=N lr=X seed=N domain=NAME]"
)
OWN = ("vision", "text", "text_pooling", "projection_dim", "domain")


def make(arguments: list[str]) -> None:
    """`fedfrozen align OUT vision=DIR text=DIR ...`; the other words are a run's: dataset, device."""
    if not arguments or "=" in arguments[0]:
        raise UserError(f"Say where the dual encoder goes: {USAGE}.")
    folder = Path(arguments[0]).expanduser()
    check_is_neither(folder.resolve(), "a dual encoder")
    known = {*OWN, *(field.name for field in fields(AlignSettings))}
    given = {k: v for k, _, v in (word.partition("=") for word in arguments[1:]) if k in known}
    # strategy=fedavg: this only reads data, and must not require a dual encoder, which does not exist yet.
    overrides = [word for word in arguments[1:] if word.partition("=")[0] not in known]
    config = compose_run(["strategy=fedavg", *overrides]).config
    for key in ("vision", "text"):
        if not Path(given.get(key, "")).is_dir() or key not in given:
            raise UserError(f"{key}={given.get(key, '')} is no folder of a pretrained encoder: {USAGE}.")
    settings = _settings({key: value for key, value in given.items() if key not in OWN})
    corpus = load_corpus(config)
    if corpus.task != "image":
        raise UserError("Alignment needs pictures with class names: choose an image dataset.")
    rows = align_rows(corpus, config)[1]
    if "domain" in given:
        if given["domain"] not in corpus.columns.get("domain", ()):
            raise UserError(f"domain={given['domain']} is in no row of the data: leave it out or correct it.")
        rows = rows[corpus.columns["domain"][rows] == given["domain"]]
    if not len(rows):
        raise UserError("No rows are set apart to align on: add dataset.align=0.2, here and in later runs.")
    dual = join(
        given["vision"], given["text"], given.get("text_pooling", "mean"), given.get("projection_dim", "256")
    )
    check_pictures(dual, input_shape(corpus, config))
    pictures = pictures_of(corpus, rows)
    if config.dataset.mean is None and len(corpus.mean) == len(IMAGENET["mean"]):
        # Pretrained image encoders expect ImageNet's normalisation, not that of these data.
        pictures = Pictures(pictures.pixels, pictures.labels, pictures.classes, **IMAGENET)
    log.info("Aligning on %d rows that no run with this dataset.align trains or tests on.", len(rows))
    metrics = align(dual, pictures, settings, device_of(config.device))
    with whole_folder(folder.resolve()) as part:
        save(dual, pictures, metrics | {"dataset": vars(config.dataset), "command": arguments}, part)
    shown = {
        key: metrics[key]
        for key in ("rows", "probe_accuracy", "zero_shot_accuracy", "chance")
        if key in metrics
    }
    print(json.dumps({"folder": str(folder), **shown}))


def join(vision: str, text: str, pooling: str, projection_dim: str) -> DualEncoder:
    """The two encoders with fresh projections, from torch's seed 0."""
    if pooling not in ("mean", "pooler"):
        raise UserError(f"text_pooling={pooling} is unknown: choose mean or pooler.")
    if not projection_dim.isdigit() or not int(projection_dim):
        raise UserError(f"projection_dim={projection_dim} must be a whole number of at least 1.")
    try:
        configs = [AutoConfig.from_pretrained(path, local_files_only=True) for path in (vision, text)]
        joint = VisionTextDualEncoderConfig.from_vision_text_configs(
            *configs, projection_dim=int(projection_dim)
        )
        with silence_transformers(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            towers = [AutoModel.from_pretrained(path, local_files_only=True) for path in (vision, text)]
            model: Any = VisionTextDualEncoderModel(joint, *towers)
    except (OSError, ValueError) as error:
        raise UserError(f"The encoders cannot be loaded: {' '.join(str(error).split())}") from error
    return DualEncoder(model, tokenizer_of(text), pooling=pooling)


def _settings(given: dict[str, str]) -> AlignSettings:
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(AlignSettings),
            OmegaConf.from_dotlist([f"{k}={v}" for k, v in given.items()]),
        )
        found = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(sentence(error)) from error
    assert isinstance(found, AlignSettings)
    return found.checked()
