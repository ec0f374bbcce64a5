"""What a client does differently: the base of every file in clients/.

An algorithm is pure: arrays in, arrays out. Runners bring optimiser, batches, clipping and precision, so that
one file serves one client after another, a whole cohort under `vmap`, every runtime, checkpoints and sites.
Use tensor operations only, and no Python branch on a tensor's value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedfrozen_app.models.task import Batch, Parameters, Task

ByNamespace = Mapping[str, Parameters]  # namespace: arrays by the name of the parameter they belong to


@dataclass(frozen=True)
class Start:
    """What a client has as its round begins."""

    model: Parameters  # every parameter; the private ones are the client's own
    trained: tuple[str, ...]  # the names that train in this round
    order: ByNamespace = field(default_factory=dict)  # what came with the order, for the shared names
    own: ByNamespace = field(default_factory=dict)  # what the client keeps, for the names that train

    @property
    def anchor(self) -> dict[str, Tensor]:
        """The trained names as the round began."""
        return {name: self.model[name] for name in self.trained}


@dataclass(frozen=True)
class Finished:
    """What a client keeps and sends beside what it trained."""

    own: ByNamespace = field(default_factory=dict)
    reply: ByNamespace = field(default_factory=dict)  # for every name that is shared
    model: Parameters = field(default_factory=dict)  # sent in place of the trained values of these names
    figures: Mapping[str, Tensor] = field(default_factory=dict)  # numbers, averaged by examples in the row


class Algorithm:
    """Plain training. A dataclass of its settings, which the strategy sends with every order."""

    comes: ClassVar[tuple[str, ...]] = ()  # namespaces of arrays that come with the order
    stays: ClassVar[tuple[str, ...]] = ()  # that the client keeps between its rounds
    trains: ClassVar[tuple[str, ...]] = ()  # of these, the ones that are trained beside the parameters
    goes: ClassVar[tuple[str, ...]] = ()  # that go back with the reply
    # Of those that stay and are not trained, the ones with a single number for each name, not an array.
    numbers: ClassVar[tuple[str, ...]] = ()

    def start(self, model: Parameters, own: ByNamespace) -> ByNamespace:
        """The client's own arrays for this round's trained names, `model`; `own` is what it has kept of them.

        Those that it has not kept begin at zero.
        """
        return {
            space: {
                name: own.get(space, {}).get(
                    name, value.new_zeros(()) if space in self.numbers else torch.zeros_like(value)
                )
                for name, value in model.items()
            }
            for space in self.stays
        }

    def seen(self, shift: Tensor, batch: Batch, task: Task, start: Start) -> Tensor:
        """A loss on the round's first batch, before any step, as a function of one number of the client's.

        The runner takes its slope at `shift` = 0. The model is not in training mode: nothing is dropped.
        """
        raise NotImplementedError

    def look(self, slope: Tensor, start: Start, rate: float) -> ByNamespace:
        """What the client's own arrays become by that slope; those that it does not name stay."""
        return {}

    def loss(self, parameters: Parameters, batch: Batch, task: Task, start: Start) -> Tensor:
        """The scalar that a step descends. `start.own` of a namespace in `trains` is what trains."""
        return task.loss(parameters, batch)

    def finish(self, start: Start, trained: Parameters, steps: Tensor, rate: float) -> Finished:
        """After `steps` steps at the learning rate `rate`."""
        return Finished()

    def personal(self, model: Parameters, own: ByNamespace) -> Parameters:
        """The client's personal model, where that is not what it trains and shares: values for the names of
        `model`, which are the trained ones, out of what it keeps. Empty: it is the same model."""
        return {}

    @classmethod
    def is_personal(cls) -> bool:
        """Whether clients have models of their own beside what they share."""
        return cls.personal is not Algorithm.personal

    def looks(self) -> bool:
        """Whether it looks at the round's first batch."""
        return type(self).look is not Algorithm.look

    @classmethod
    def is_plain(cls) -> bool:
        """Whether its loss is the task's own, which looks back at nothing."""
        return cls.loss is Algorithm.loss

    @classmethod
    def adds_nothing(cls) -> bool:
        """Whether what a client keeps and sends is what it trained, and no more."""
        return cls.finish is Algorithm.finish

    @classmethod
    def has_arrays(cls) -> bool:
        return bool(cls.comes or cls.stays or cls.goes)


def squared_distance(parameters: Parameters, anchor: Parameters) -> Tensor:
    """‖w − a‖² over the names of `anchor`."""
    return torch.stack([(parameters[name] - anchor[name]).square().sum() for name in anchor]).sum()
