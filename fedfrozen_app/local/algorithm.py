"""What a client does differently: the base of every file in clients/.

An algorithm is pure: arrays in, arrays out. Runners provide optimiser, batches, clipping and precision, so
that one file serves the sequential runner, a whole cohort under `vmap`, every runtime, checkpoints and sites.
Use tensor operations only, and no Python branch on a tensor's value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedfrozen_app.core.deprecated import Alias, adopt_old_names, old_keywords
from fedfrozen_app.models.task import Batch, Parameters, Task

ByNamespace = Mapping[str, Parameters]  # namespace: arrays by the name of the parameter they belong to


@old_keywords(order="from_server", own="client_state")
@dataclass(frozen=True)
class Start:
    """What a client has as its round begins."""

    model: Parameters  # every parameter; the private ones are the client's own
    trained: tuple[str, ...]  # the names that train in this round
    from_server: ByNamespace = field(default_factory=dict)  # sent with the request, for the shared names
    client_state: ByNamespace = field(default_factory=dict)  # kept by the client, for the names that train
    # Of `model` over all training rows of the client, where the algorithm asks for it: the task's mean loss,
    # and its gradient by trained name.
    loss: Tensor | None = None
    gradient: Parameters | None = None

    @property
    def anchor(self) -> dict[str, Tensor]:
        """The trained names as the round began."""
        return {name: self.model[name] for name in self.trained}

    order, own = Alias("from_server"), Alias("client_state")


@old_keywords(own="client_state", reply="to_server", figures="metrics")
@dataclass(frozen=True)
class Finished:
    """What a client keeps and sends besides what it trained."""

    client_state: ByNamespace = field(default_factory=dict)
    to_server: ByNamespace = field(default_factory=dict)  # for every name that is shared
    model: Parameters = field(default_factory=dict)  # sent in place of the trained values of these names
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # numbers, averaged by examples in the row

    own, reply, figures = Alias("client_state"), Alias("to_server"), Alias("metrics")


class Algorithm:
    """Plain training. A dataclass of its settings, which the strategy sends with every train request."""

    from_server: ClassVar[tuple[str, ...]] = ()  # namespaces of arrays that come with the train request
    client_state: ClassVar[tuple[str, ...]] = ()  # kept by the client between its rounds
    trainable_state: ClassVar[tuple[str, ...]] = ()  # of these, those that train besides the parameters
    to_server: ClassVar[tuple[str, ...]] = ()  # sent with the reply
    # Of the untrained client state, the namespaces with a single number for each name, not an array.
    scalar_state: ClassVar[tuple[str, ...]] = ()
    # Arrays that `step` reads and replaces, one per trained name. Those also in `client_state` are kept
    # between rounds; the others are zero at the start of each round.
    step_state: ClassVar[tuple[str, ...]] = ()
    # Declares that `step` uses nothing of the data but `gradient`: then it is sound after DP-SGD's noise.
    private_step: ClassVar[bool] = False
    # Whether the runner sets `start.loss` and `start.gradient`: one more pass over the client's rows.
    start_loss: ClassVar[bool] = False
    start_gradient: ClassVar[bool] = False

    metric_names: ClassVar[tuple[str, ...]] = ()  # metrics that `finish` adds

    # Old names, for one release.
    comes, stays, goes = Alias("from_server"), Alias("client_state"), Alias("to_server")
    trains, numbers, tells = Alias("trainable_state"), Alias("scalar_state"), Alias("metric_names")
    seen, look = Alias("first_batch_loss"), Alias("adapt")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_old_names(cls)

    def start(self, model: Parameters, own: ByNamespace) -> ByNamespace:
        """The client's own arrays for this round's trained names, `model`; `own` is what it has kept of them.

        Those that it has not kept begin at zero.
        """
        return {
            space: {
                name: own.get(space, {}).get(
                    name, value.new_zeros(()) if space in self.scalar_state else torch.zeros_like(value)
                )
                for name, value in model.items()
            }
            for space in self.client_state
        }

    def first_batch_loss(self, shift: Tensor, batch: Batch, task: Task, start: Start) -> Tensor:
        """A loss on the round's first batch, before any step, as a function of one number of the client's.

        The runner takes its gradient at `shift` = 0. The model is not in training mode: there is no dropout.
        """
        raise NotImplementedError

    def adapt(self, gradient: Tensor, start: Start, rate: float) -> ByNamespace:
        """The client state that changes by that gradient; what is not returned does not change."""
        return {}

    def loss(self, parameters: Parameters, batch: Batch, task: Task, start: Start) -> Tensor:
        """The scalar that a step minimises. For a namespace in `trainable_state`, `start.client_state` holds
        the values that train."""
        return task.loss(parameters, batch)

    def step(
        self, parameters: Parameters, gradient: Parameters, state: ByNamespace, start: Start, lr: Tensor
    ) -> tuple[Parameters, ByNamespace]:
        """One step in place of `client.optimizer`: the new values of the trained names, and of `step_state`.

        `gradient` is that of `loss`, clipped by `client.clip`; `lr` is the round's learning rate, one number.
        For a namespace in `step_state`, `start.client_state` holds the current values, here and in `finish`.
        """
        raise NotImplementedError

    def finish(self, start: Start, trained: Parameters, steps: Tensor, rate: float) -> Finished:
        """After `steps` steps at the learning rate `rate`."""
        return Finished()

    def personal(self, model: Parameters, own: ByNamespace) -> Parameters:
        """The client's personal model, where that is not what it trains and shares: values for the names of
        `model`, which are the trained ones, out of what it keeps. Empty: it is the same model."""
        return {}

    @classmethod
    def is_personal(cls) -> bool:
        """Whether clients have models of their own besides what they share."""
        return cls.personal is not Algorithm.personal

    def adapts(self) -> bool:
        """Whether it reads the round's first batch before training."""
        return type(self).adapt is not Algorithm.adapt

    @classmethod
    def is_plain(cls) -> bool:
        """Whether its loss is the task's own, which does not read the start of the round."""
        return cls.loss is Algorithm.loss

    @classmethod
    def losses_reported(cls) -> tuple[str, ...]:
        """The metrics that a runner reports of the steps' losses: means of the task's own loss, and of what
        `loss` adds to it."""
        return ("train_loss",) if cls.is_plain() else ("train_loss", "surrogate_loss")

    @classmethod
    def has_step(cls) -> bool:
        """Whether it takes its own steps in place of `client.optimizer`."""
        return cls.step is not Algorithm.step

    @classmethod
    def evaluates_start(cls) -> bool:
        """Whether the runner evaluates the model on the client's training rows before the first step."""
        return cls.start_loss or cls.start_gradient

    @classmethod
    def reads_start(cls) -> bool:
        """Whether its steps may read the model with which the round began."""
        return not cls.is_plain() or cls.has_step() or cls.evaluates_start()

    @classmethod
    def transient_state(cls) -> tuple[str, ...]:
        """The `step_state` that a client does not keep between rounds."""
        return tuple(space for space in cls.step_state if space not in cls.client_state)

    @classmethod
    def adds_nothing(cls) -> bool:
        """Whether what a client keeps and sends is what it trained, and no more."""
        return cls.finish is Algorithm.finish

    @classmethod
    def has_arrays(cls) -> bool:
        return bool(cls.from_server or cls.client_state or cls.to_server)


def squared_distance(parameters: Parameters, anchor: Parameters) -> Tensor:
    """‖w − a‖² over the names of `anchor`."""
    return torch.stack([(parameters[name] - anchor[name]).square().sum() for name in anchor]).sum()
