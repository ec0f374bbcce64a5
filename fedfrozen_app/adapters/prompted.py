"""The wrapper that reads a frozen dual encoder through prompts."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fedfrozen_app.adapters.dual import DualEncoder, backbone_digest
from fedfrozen_app.adapters.dual_load import load_dual
from fedfrozen_app.adapters.prompts import PromptedDual, build_prompted
from fedfrozen_app.config import Config
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.federated import input_shape
from fedfrozen_app.data.table import Corpus, InputShape
from fedfrozen_app.models.wrapper import Wrapper, first_seed


@dataclass
class Prompted(Wrapper):
    """Prompts and their fusion are trained; the encoders are loaded on each side, and checked by digest."""

    design: Any  # of adapters/design.py
    reading: type[PromptedDual] = PromptedDual
    # A client's private part needs another build: look up the encoders once.
    _backbone: DualEncoder | None = field(default=None, init=False, repr=False, compare=False)

    reusable: ClassVar[bool] = False  # prompts' initial values and design belong to one run

    def build(self, config: Config, corpus: Corpus) -> PromptedDual:
        return build_prompted(
            self.backbone(config, corpus),
            self.design,
            shape=input_shape(corpus, config),
            seed=first_seed(config),
            reading=self.reading,
        )

    def outline(self, config: Config, shape: InputShape) -> PromptedDual:
        """Only sizes matter, so encoders that would need alignment may keep random weights."""
        source = "config" if config.model.source == "aligned" else config.model.source
        backbone = _load(config, source, config.model.path, seed=0)
        return build_prompted(backbone, self.design, shape=shape, seed=0, reading=self.reading)

    def data_spec(self, config: Config, corpus: Corpus) -> dict[str, Any]:
        """The encoders' digest, and their training normalisation unless `dataset` sets one."""
        backbone = self.backbone(config, corpus)
        found: dict[str, Any] = {"backbone": backbone_digest(backbone)}
        if backbone.mean is not None and config.dataset.mean is None:
            found["mean"] = list(backbone.mean)
        if backbone.std is not None and config.dataset.std is None:
            found["std"] = list(backbone.std)
        return found

    def check_data_spec(self, own: Mapping[str, Any], federation: Mapping[str, Any]) -> None:
        if federation.get("backbone") != own["backbone"]:
            raise UserError(
                "The frozen encoders here are not the federation's (their digests differ): give this node "
                "the server's model folder, with --node-config 'model-path=\"/folder\"' if it lies elsewhere."
            )

    def backbone(self, config: Config, corpus: Corpus) -> DualEncoder:
        """The frozen dual encoder that the configuration names."""
        if self._backbone is None:
            source, path = config.model.source, config.model.path
            if source == "aligned":
                source, path = "checkpoint", str(registry.find("backbones", "aligned")(config, corpus))
            self._backbone = _load(config, source, path, seed=first_seed(config))
        return self._backbone

    def fixed_names(self, model: PromptedDual) -> frozenset[str]:
        return model.frozen_names

    def settle(self, model: PromptedDual) -> None:
        model.settle()

    def features(self, model: PromptedDual) -> Callable[[Tensor], Tensor] | None:
        return model.encode_images if model.images_are_fixed else None

    @property
    def has_global(self) -> bool:
        return self.design.prompts != "local"

    def only_global(self, model: PromptedDual) -> AbstractContextManager[None]:
        return model.only_global()

    def reading_classes(self, model: PromptedDual, classes: tuple[str, ...]) -> AbstractContextManager[None]:
        return model.reading(classes)

    def metrics(self, model: PromptedDual) -> dict[str, float]:
        return model.metrics()


def _load(config: Config, source: str, path: str | None, *, seed: int) -> DualEncoder:
    model = config.model
    return load_dual(
        source=source,
        path=path,
        model_type=model.model_type,
        config=model.config,
        dtype=model.dtype,
        seed=seed,
    )
