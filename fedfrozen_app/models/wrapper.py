"""The seam between a configuration and the model that a run trains.

A plain model is built as the configuration says, and all its parameters may be exchanged. What reads a model
through something else (prompts, adapters) subclasses `Wrapper` and overrides the answers that differ. What
trains, judges, plans and exports asks the wrapper, so that it knows no method by name.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from fedfrozen_app import registry
from fedfrozen_app.config import Config, strategy_settings
from fedfrozen_app.data.federated import input_shape
from fedfrozen_app.data.table import Corpus, InputShape
from fedfrozen_app.errors import UserError
from fedfrozen_app.models.build import build_model, outline_model
from fedfrozen_app.models.transformer import export_model
from fedfrozen_app.seeds import seed_for


@dataclass
class Wrapper:
    """A plain model. Two runs may share a model only where their wrappers are equal: settings are fields."""

    reusable: ClassVar[bool] = True  # whether a built model may serve another run, from its beginning

    # Before training ---------------------------------------------------------------------------------

    def build(self, config: Config, corpus: Corpus) -> nn.Module:
        """The run's model with its first values, in eval mode, on the CPU; called again to begin again."""
        return build_model(
            **_settings(config),
            shape=input_shape(corpus, config),
            seed=seed_for(config.seed, "model"),
        )

    def outline(self, config: Config, shape: InputShape) -> nn.Module:
        """A model of the same names, shapes and roles, for `fedfrozen plan`: its values are never read."""
        return outline_model(**_settings(config), shape=shape)

    def card(self, config: Config, corpus: Corpus) -> dict[str, Any]:
        """What to add to, or change in, the card that the server sends each client before the first round."""
        return {}

    def check_card(self, own: Mapping[str, Any], federation: Mapping[str, Any]) -> None:
        """Refuse to take part, with a `UserError`, where the federation's model is not the one here."""

    def fixed_names(self, model: Any) -> frozenset[str]:
        """Parameters that server and clients each load for themselves: neither trained nor exchanged."""
        return frozenset()

    def settle(self, model: Any) -> None:
        """Compute once what training cannot change; called when the model is on its device."""

    def features(self, model: Any) -> Callable[[Tensor], Tensor] | None:
        """How a batch of pictures becomes features that training cannot change, so that each is read once;
        the model is then called with `image_features`. None: it reads the pictures themselves."""
        return None

    # While it trains, and after ----------------------------------------------------------------------

    @property
    def has_global(self) -> bool:
        """Whether what is shared makes a model that can be judged without any client's private part."""
        return False

    def only_global(self, model: Any) -> AbstractContextManager[None]:
        """Within it the model is what the server knows of it."""
        return nullcontext()

    def reading_classes(self, model: Any, classes: tuple[str, ...]) -> AbstractContextManager[None]:
        """Within it the model chooses among these classes, which it was not trained for."""
        raise UserError(
            "dataset.novel judges a model on classes that nobody trained on, but this one scores those alone "
            "that it knows: leave dataset.novel out, or choose a strategy that reads class names, "
            "such as strategy=pfeddc."
        )

    def figures(self, model: Any) -> dict[str, float]:
        """What the model reports of itself beside its loss."""
        return {}

    def export(self, model: Any, folder: Path, classes: Sequence[str]) -> None:
        """Write the model as a folder for transformers' `from_pretrained`."""
        export_model(model, folder, classes)


def wrapper_of(config: Config) -> Wrapper:
    """The wrapper that the configuration asks for: its strategy's, or that of a plain model."""
    strategy = registry.find("strategies", str(config.strategy["name"]))
    return strategy.wrapper(strategy_settings(config)) or Wrapper()


def _settings(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "source": model.source,
        "path": model.path,
        "model_type": model.model_type,
        "config": model.config,
        "dtype": model.dtype,
        "roles": model.roles,
        "checkpointing": model.gradient_checkpointing,
    }
