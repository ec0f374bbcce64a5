"""The wrapper of a frozen model with low-rank adapters (adapters/lora.py).

Adapters and head are trained and sent. The other weights are the base: server and clients each load it, and
identify it by one digest. A client with another base requests the federation's, and keeps it.
"""

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedfrozen_app.adapters import lora, peft_folder
from fedfrozen_app.config import AdapterConfig, Config
from fedfrozen_app.core.digests import digests
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import Corpus, InputShape
from fedfrozen_app.models.build import parameters_of
from fedfrozen_app.models.export import export_model
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.models.spec import PRETRAINED
from fedfrozen_app.models.wrapper import Wrapper

log = logging.getLogger(__name__)
BASE = "base"  # in the data spec: the digest of the frozen weights


@dataclass
class Adapted(Wrapper):
    settings: AdapterConfig
    reusable: ClassVar[bool] = False  # another run may have another base
    merges: ClassVar[bool] = True

    # Built for the data spec, then reused; the digest is that of the base as built.
    _ready: nn.Module | None = field(default=None, init=False, repr=False, compare=False)
    _digest: str = field(default="", init=False, repr=False, compare=False)
    # Weights before the first merged delta, and the deltas that are applied to them.
    _original: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _merged_deltas: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _base_path: str | None = field(default=None, init=False, repr=False, compare=False)

    def build(self, config: Config, corpus: Corpus) -> nn.Module:
        model, self._ready = self._ready, None
        if model is None:
            model = super().build(config, corpus)
            self._inject(model, config.seed)
            self._digest = self._digest or base_digest(self._fixed(model))
            self._base_path = config.model.path if config.model.source in PRETRAINED else None
            if self.settings.path is not None:
                self._read(model, self.settings.path)
        return model

    def _read(self, model: nn.Module, path: str) -> None:
        settings = self.settings
        names = peft_folder.read(model, path, rank=settings.rank, alpha=settings.alpha, base=self._digest)
        if not any(roles_of(model)[name].kind == "head" for name in names):
            log.info("%s has no head: this run's starts with fresh weights.", path)

    def outline(self, config: Config, shape: InputShape) -> nn.Module:
        model = super().outline(config, shape)
        self._inject(model, config.seed)
        return model

    def _inject(self, model: nn.Module, seed: int) -> None:
        settings = self.settings
        lora.inject(
            model,
            roles_of(model),
            words(settings.targets),
            layers_in(settings.layers),
            rank=settings.rank,
            scale=settings.alpha / settings.rank,
            dropout=settings.dropout,
            seed=seed,
        )
        fixed = self.fixed_names(model)
        for name, parameter in model.named_parameters():
            if name not in fixed and parameter.dtype is torch.bfloat16:  # small steps would be rounded away
                parameter.data = parameter.data.float()

    def data_spec(self, config: Config, corpus: Corpus) -> dict[str, Any]:
        if not self._digest:
            self._ready = self.build(config, corpus)
        return {BASE: self._digest}

    def marks(self) -> dict[str, str]:
        return {BASE: self._digest}

    def check_marks(self, marks: Mapping[str, str]) -> None:
        if marks.get(BASE, self._digest) != self._digest:
            raise UserError(
                "The frozen weights here are not those that the run's adapters were trained on (their "
                "digests differ): give the model as it was then."
            )

    def lacks(self, own: Mapping[str, Any], federation: Mapping[str, Any]) -> bool:
        return federation.get(BASE) != own[BASE]

    def fixed_names(self, model: nn.Module) -> frozenset[str]:
        roles = roles_of(model)
        return frozenset(name for name, role in roles.items() if not (role.adapter or role.kind == "head"))

    def _fixed(self, model: nn.Module) -> dict[str, Tensor]:
        fixed = self.fixed_names(model)
        return {name: value for name, value in parameters_of(model).items() if name in fixed}

    def fixed_values(self, model: nn.Module) -> dict[str, Tensor]:
        return self._fixed(model) | self._original

    @torch.no_grad()
    def apply_merged_deltas(self, model: nn.Module, arrays: Mapping[str, Tensor]) -> None:
        """Set the weights to the base plus these deltas, in the order of rounds: the same bits whatever was
        applied before."""
        if set(self._merged_deltas) == set(arrays):
            return
        for path, merged_deltas in lora.merged_deltas_by_path(arrays).items():
            module = model.get_submodule(path)
            weight: Any = module.weight
            before = self._original.setdefault(f"{path}.weight", weight.detach().clone())
            merged_deltas = {name: value.to(before.device) for name, value in merged_deltas.items()}
            weight.copy_(lora.added_to(before, lora.sum_of(merged_deltas), module))
        self._merged_deltas = dict(arrays)

    def widened(self, name: str, array: Tensor, shape: Sequence[int]) -> Tensor:
        return lora.widened(name, array, shape)

    def narrowed(self, name: str, array: Tensor, shape: Sequence[int]) -> Tensor:
        return lora.narrowed(name, array, shape[0] if name.endswith(lora.A) else shape[1])

    def export(self, model: Any, folder: Path, classes: Sequence[str], *, merged: bool = True) -> None:
        """Export one plain model with merged adapters, or a peft adapter, with its base if that was built
        from scratch."""
        if merged:
            export_model(model, folder, classes, merged_state(model))
            return
        if self._base_path is None:
            state = {name: value for name, value in model.state_dict().items() if not lora.is_adapter(name)}
            export_model(model, folder / peft_folder.BASE, classes, state | self.fixed_values(model))
        peft_folder.write(
            model,
            folder,
            rank=self.settings.rank,
            alpha=self.settings.alpha,
            merged_deltas=self._merged_deltas,
            base=self._digest,
            base_path=self._base_path,
            classes=classes,
        )


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of the same model without adapters, whose weights are W₀ + s·BA."""
    state = {name: value for name, value in model.state_dict().items() if not lora.is_adapter(name)}
    for path in lora.adapted(dict(model.named_parameters())):
        module = model.get_submodule(path)
        state[f"{path}.weight"] = lora.added_to(state[f"{path}.weight"], lora.change_of(module), module)
    return state


def base_digest(arrays: Mapping[str, Tensor]) -> str:
    """One digest of all these arrays and their names."""
    found = digests(arrays)
    return hashlib.sha256("\n".join(f"{name} {found[name]}" for name in sorted(found)).encode()).hexdigest()


def words(targets: Any) -> list[str]:
    """`query value` and [query, value] alike."""
    found = targets.split() if isinstance(targets, str) else targets
    if not isinstance(found, list) or not found or not all(isinstance(word, str) for word in found):
        raise UserError(
            f"adapter.targets={targets} names no projections: give roles, such as [query,value] or all."
        )
    return found


def layers_in(text: str | None) -> range | None:
    """`8-11`, or one layer; None: all."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", str(text))
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise UserError(f"adapter.layers={text} is no range of layers: give the first and the last, as 8-11.")
    return range(int(found[1]), int(found[2] or found[1]) + 1)
