"""The seam between a configuration and the model that a run trains.

A plain model is built from the configuration, and all its parameters may be exchanged. A model with prompts
or adapters has a subclass of `Wrapper`. Training, evaluation, planning and export call the wrapper, so that
they are independent of methods.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from fedfrozen_app.config import Config, strategy_settings
from fedfrozen_app.core import registry
from fedfrozen_app.core.deprecated import Alias, adopt_old_names
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.seeds import seed_for
from fedfrozen_app.data.federated import input_shape
from fedfrozen_app.data.table import Corpus, InputShape
from fedfrozen_app.models.build import build_model, outline_model
from fedfrozen_app.models.export import export_model


@dataclass
class Wrapper:
    """The wrapper of a plain model. Runs share a model only if their wrappers are equal."""

    reusable: ClassVar[bool] = True  # whether a built model may be reused by another run
    merges: ClassVar[bool] = False  # whether it is exported as parts unless `merged`

    # Old names, for one release.
    card, check_card = Alias("data_spec"), Alias("check_data_spec")
    figures, fold = Alias("metrics"), Alias("apply_merged_deltas")

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        adopt_old_names(cls)

    # Before training ---------------------------------------------------------------------------------

    def build(self, config: Config, corpus: Corpus) -> nn.Module:
        """Build the run's model with its initial values, in eval mode, on the CPU; called again to reset."""
        return build_model(
            **_settings(config),
            shape=input_shape(corpus, config),
            seed=first_seed(config),
        )

    def outline(self, config: Config, shape: InputShape) -> nn.Module:
        """A model of the same names, shapes and roles, for `fedfrozen plan`: its values are never read."""
        return outline_model(**_settings(config), shape=shape)

    def data_spec(self, config: Config, corpus: Corpus) -> dict[str, Any]:
        """Additions and changes to the data spec that the server sends each client before the first round."""
        return {}

    def marks(self) -> dict[str, str]:
        """Header entries for files with the run's arrays: they identify the parameters that the files
        lack."""
        return {}

    def check_marks(self, marks: Mapping[str, str]) -> None:
        """Raise a `UserError` for a file with other fixed parameters than this model's."""

    def check_data_spec(self, own: Mapping[str, Any], federation: Mapping[str, Any]) -> None:
        """Raise a `UserError` if the federation's model is not the one here."""

    def fixed_names(self, model: Any) -> frozenset[str]:
        """Parameters that server and clients each load for themselves: neither trained nor exchanged."""
        return frozenset()

    def fixed_values(self, model: Any) -> dict[str, Tensor]:
        """The loaded values of fixed parameters, for a client that has others."""
        return {}

    def lacks(self, own: Mapping[str, Any], federation: Mapping[str, Any]) -> bool:
        """Whether this node's fixed parameters differ from the federation's, by both data specs, and must be
        sent."""
        return False

    def apply_merged_deltas(self, model: Any, arrays: Mapping[str, Tensor]) -> None:
        """Set the model's fixed weights to their loaded values plus these merged deltas."""
        raise ValueError("a train request has merged deltas for a model that takes none")

    def widened(self, name: str, array: Tensor, shape: Sequence[int]) -> Tensor:
        """A client's smaller array padded to its parameter's shape; `ValueError` if that is impossible."""
        raise ValueError(f"{name} has the shape {tuple(array.shape)}, not {tuple(shape)}")

    def narrowed(self, name: str, array: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse."""
        raise ValueError(f"{name} has the shape {tuple(array.shape)}, not {tuple(shape)}")

    def settle(self, model: Any) -> None:
        """Precompute values that training does not change; called when the model is on its device."""

    def features(self, model: Any) -> Callable[[Tensor], Tensor] | None:
        """A function from a batch of images to features that training does not change, so that each is
        computed once; the model is then called with `image_features`. None: the model reads the images
        themselves."""
        return None

    # While it trains, and after ----------------------------------------------------------------------

    @property
    def has_global(self) -> bool:
        """Whether the shared parameters form a model that can be evaluated without private parts."""
        return False

    def only_global(self, model: Any) -> AbstractContextManager[None]:
        """Context in which the model consists of what the server knows."""
        return nullcontext()

    def reading_classes(self, model: Any, classes: tuple[str, ...]) -> AbstractContextManager[None]:
        """Context in which the model predicts among these classes, which it was not trained on."""
        raise UserError(
            "dataset.novel evaluates a model on classes that no client trained on, but this one scores those "
            "alone that it knows: leave dataset.novel out, or choose a strategy that reads class names, "
            "such as strategy=pfeddc."
        )

    def metrics(self, model: Any) -> dict[str, float]:
        """Metrics of the model itself, in addition to its loss."""
        return {}

    def export(self, model: Any, folder: Path, classes: Sequence[str], *, merged: bool = True) -> None:
        """Write the model as a folder for transformers' `from_pretrained`; as separate parts if it has some
        and not `merged`."""
        export_model(model, folder, classes)


def wrapper_of(config: Config) -> Wrapper:
    """The wrapper that the configuration asks for: its strategy's, its adapter's, or a plain model's."""
    strategy = registry.find("strategies", str(config.strategy["name"]))
    own: Wrapper | None = strategy.wrapper(strategy_settings(config))
    if config.adapter.name == "none":
        return own or Wrapper()
    if own is not None:
        raise UserError(
            f"strategy={config.strategy['name']} reads the model in a way of its own, which leaves no place "
            f"for adapter={config.adapter.name}: use adapter=none, or another strategy."
        )
    found: Wrapper = registry.find("adapters", config.adapter.name)(config.adapter)
    return found


def first_seed(config: Config) -> int:
    """The torch seed before the model is built."""
    return config.seed if config.model.seeding == "plain" else seed_for(config.seed, "model")


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
