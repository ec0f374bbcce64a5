"""What is trained, shared and private in one round."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from fedfrozen_app.exchange.role import Role


@dataclass(frozen=True)
class Phase:
    """Part of a client's round that trains only these names, for `epochs` epochs (None:
    `client.local_epochs`)."""

    trained: tuple[str, ...]
    epochs: int | None = None


@dataclass(frozen=True)
class Plan:
    """The names that are trained, shared and private; a name that is neither trained nor private is frozen.

    `shared` names are sent to the server after training; `private` names never leave the client. Without
    `phases`, all trained names train together.
    """

    trained: tuple[str, ...]
    shared: tuple[str, ...]
    private: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        if leak := set(self.shared) & set(self.private):
            raise ValueError(f"a private name would travel: {sorted(leak)}")
        if extra := set(self.shared) - set(self.trained):
            raise ValueError(f"a shared name is not trained: {sorted(extra)}")
        if self.phases and {name for phase in self.phases for name in phase.trained} != set(self.trained):
            raise ValueError("the phases of a round must together train what its plan trains")

    @classmethod
    def full(cls, names: Iterable[str]) -> "Plan":
        """Everything is trained and shared: FedAvg."""
        names = tuple(names)
        return cls(trained=names, shared=names)

    def freeze(self, names: Iterable[str]) -> "Plan":
        """The same plan with these names neither trained nor sent."""
        frozen = set(names)
        return replace(
            self,
            trained=_without(self.trained, frozen),
            shared=_without(self.shared, frozen),
            phases=tuple(replace(phase, trained=_without(phase.trained, frozen)) for phase in self.phases),
        )

    def keep_private(self, names: Iterable[str]) -> "Plan":
        """The same plan with these names kept on the client."""
        kept = tuple(names)
        return replace(self, shared=_without(self.shared, set(kept)), private=kept)

    def keep_layers(self, layers: Iterable[int], roles: Mapping[str, Role]) -> "Plan":
        """The same plan with all other layers frozen; names outside the layers do not change."""
        kept = {None, *layers}
        return self.freeze(name for name in self.trained if roles[name].layer not in kept)

    def in_phases(self, *phases: Phase) -> "Plan":
        """The same plan with these phases one after another; names that it does not train are left out."""
        trained = set(self.trained)
        trimmed = (
            replace(phase, trained=tuple(name for name in phase.trained if name in trained))
            for phase in phases
        )
        return replace(self, phases=tuple(trimmed))

    @property
    def steps(self) -> tuple[Phase, ...]:
        """The phases of a client's round, without those in which nothing trains."""
        return tuple(phase for phase in self.phases if phase.trained) or (Phase(self.trained),)


def _without(names: tuple[str, ...], others: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in others)


def layers_of(names: Iterable[str], roles: Mapping[str, Role]) -> list[int]:
    """The indices of these names' layers, in ascending order."""
    return sorted({layer for name in names if (layer := roles[name].layer) is not None})
