"""A dual encoder for runs that have none: trained on this machine from a configuration and cached on disk.

CLIP would need a download. `model.source=aligned` trains the two encoders of its configuration from scratch,
on the rows that `dataset.align` reserves; a run neither trains nor tests on those. Processes on one machine
find the folder by its settings. Another machine would get other bits, so the sites of a deployed federation
must share one folder (`model=checkpoint`).
"""

import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import NoReturn

import torch
from transformers import ByT5Tokenizer

from fedfrozen_app.adapters.dual import DualEncoder, check_pictures
from fedfrozen_app.adapters.dual_load import random_dual
from fedfrozen_app.align.train import AlignSettings, Pictures, align, save
from fedfrozen_app.config import Config
from fedfrozen_app.core.digests import digest
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.flower_internals import get_flwr_home
from fedfrozen_app.data.federated import align_rows, input_shape
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.models.spec import ModelSpec

log = logging.getLogger(__name__)
SETTINGS = AlignSettings(train="all", epochs=60, lr=2e-3, batch_size=64)


def aligned_folder(config: Config, corpus: Corpus) -> Path:
    """The folder of this configuration's dual encoder, which the first call on a machine creates."""
    rows = align_rows(corpus, config)[1]
    if not len(rows):
        raise UserError(
            "model.source=aligned needs rows of its own to align on: set dataset.align, say to 0.3, or use "
            "model=checkpoint."
        )
    model = config.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SETTINGS.seed)
        dual = DualEncoder(random_dual(model.model_type, model.config), ByT5Tokenizer(), pooling="mean")
    check_pictures(dual, input_shape(corpus, config))
    pictures = pictures_of(corpus, rows)
    # Identified by the pictures themselves: a path's content may have changed, or the path may be relative.
    seen = [digest(pictures.pixels), digest(pictures.labels), pictures.classes, pictures.mean, pictures.std]
    identity = [model.model_type, model.config, seen, vars(SETTINGS), torch.__version__]
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = get_flwr_home() / "fedfrozen" / "aligned" / key
    if folder.is_dir():
        return folder
    log.info("Training two small encoders on %d rows that are neither federated nor tested.", len(rows))
    metrics = align(dual, pictures, SETTINGS, torch.device("cpu"))
    log.info("Zero-shot accuracy on held-out rows: %.3f.", metrics["zero_shot_accuracy"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".part-"))
    save(dual, pictures, metrics, part)
    if folder.is_dir():  # another process was faster
        shutil.rmtree(part)
    else:
        part.rename(folder)
    return folder


def pictures_of(corpus: Corpus, rows: object) -> Pictures:
    table = corpus.train.take(rows)  # type: ignore[arg-type]
    return Pictures(table.inputs["pixel_values"], table.labels, corpus.every_class, corpus.mean, corpus.std)


def no_classifier(spec: ModelSpec) -> NoReturn:
    """The error for `model.source=aligned` with a strategy that trains the model itself."""
    raise UserError(
        "model.source=aligned makes an image and a text encoder, which are no classifier by themselves: "
        "choose another model, or a strategy that reads the two."
    )
