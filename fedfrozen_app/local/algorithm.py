"""The base class of client algorithms: every file in clients/ defines how it differs from plain training.

An algorithm is pure: arrays in, arrays out. Runners provide optimiser, batches, clipping and precision, so
that the same file works in the sequential runner, for a cohort under `vmap`, in every runtime, with
checkpoints and on sites. Use tensor operations only, and no Python branch on a tensor's value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedfrozen_app.core.deprecated import Alias, adopt_old_names, old_keywords
from fedfrozen_app.models.task import Batch, Parameters, Task

ByNamespace = Mapping[str, Parameters]  # namespace: {parameter name: array}


@old_keywords(order="from_server", own="client_state")
@dataclass(frozen=True)
class Start:
    """A client's arrays at the start of its round."""

    model: Parameters  # every parameter; the private ones are the client's own
    trained: tuple[str, ...]  # the names that are trained in this round
    from_server: ByNamespace = field(default_factory=dict)  # from the train request, for the shared names
    client_state: ByNamespace = field(default_factory=dict)  # kept by the client, for the trained names
    # Only if the algorithm asks for them: the task's mean loss of `model` over all of the client's training
    # rows, and its gradient by trained name.
    loss: Tensor | None = None
    gradient: Parameters | None = None

    @property
    def anchor(self) -> dict[str, Tensor]:
        """The values of the trained names at the start of the round."""
        return {name: self.model[name] for name in self.trained}

    order, own = Alias("from_server"), Alias("client_state")


@old_keywords(own="client_state", reply="to_server", figures="metrics")
@dataclass(frozen=True)
class Finished:
    """What a client keeps and sends in addition to its trained parameters."""

    client_state: ByNamespace = field(default_factory=dict)
    to_server: ByNamespace = field(default_factory=dict)  # for every name that is shared
    model: Parameters = field(default_factory=dict)  # sent in place of the trained values of these names
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # scalars, averaged by examples

    own, reply, figures = Alias("client_state"), Alias("to_server"), Alias("metrics")


class Algorithm:
    """Plain training. A dataclass of its settings, which the strategy sends with every train request."""

    from_server: ClassVar[tuple[str, ...]] = ()  # namespaces of arrays in the train request
    client_state: ClassVar[tuple[str, ...]] = ()  # kept by the client between its rounds
    trainable_state: ClassVar[tuple[str, ...]] = ()  # of these, those that are trained like parameters
    to_server: ClassVar[tuple[str, ...]] = ()  # sent with the reply
    # Namespaces of the untrained client state that hold one number per name instead of an array.
    scalar_state: ClassVar[tuple[str, ...]] = ()
    # Arrays that `step` reads and replaces, one per trained name. Those also in `client_state` are kept
    # between rounds; the others are zero at the start of each round.
    step_state: ClassVar[tuple[str, ...]] = ()
    # Declares that `step` reads the data through `gradient` alone, so that it is post-processing of DP-SGD.
    private_step: ClassVar[bool] = False
    # Whether the runner sets `start.loss` and `start.gradient`, at the cost of one more pass over the rows.
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
        """The client's own arrays for this round's trained names, `model`; `own`: those that it has kept.

        By default, arrays that it has not kept start at zero.
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
        """A loss on the round's first batch, before any step, as a function of one scalar per client.

        The runner takes its gradient at `shift` = 0. The model is in evaluation mode: there is no dropout.
        """
        raise NotImplementedError

    def adapt(self, gradient: Tensor, start: Start, rate: float) -> ByNamespace:
        """The new values of the client state after that gradient; namespaces not returned do not change."""
        return {}

    def loss(self, parameters: Parameters, batch: Batch, task: Task, start: Start) -> Tensor:
        """The scalar that a step minimises. For a namespace in `trainable_state`, `start.client_state` holds
        the current, trained values."""
        return task.loss(parameters, batch)

    def step(
        self, parameters: Parameters, gradient: Parameters, state: ByNamespace, start: Start, lr: Tensor
    ) -> tuple[Parameters, ByNamespace]:
        """One step in place of `client.optimizer`: the new values of the trained names, and of `step_state`.

        `gradient` is the gradient of `loss`, clipped by `client.clip`; `lr` is the round's learning rate. For
        a namespace in `step_state`, `start.client_state` holds the current values, here and in `finish`.
        """
        raise NotImplementedError

    def finish(self, start: Start, trained: Parameters, steps: Tensor, rate: float) -> Finished:
        """What to keep and send after `steps` steps at the learning rate `rate`."""
        return Finished()

    def personal(self, model: Parameters, own: ByNamespace) -> Parameters:
        """The client's personal model, if it differs from the model it trains and shares: values for the
        names of `model` (the trained ones), from the arrays it keeps. Empty: it is the same model."""
        return {}

    @classmethod
    def is_personal(cls) -> bool:
        """Whether clients have personal models besides the shared one."""
        return cls.personal is not Algorithm.personal

    def adapts(self) -> bool:
        """Whether the algorithm reads the round's first batch before training."""
        return type(self).adapt is not Algorithm.adapt

    @classmethod
    def is_plain(cls) -> bool:
        """Whether its loss is the task's own, which does not depend on the start of the round."""
        return cls.loss is Algorithm.loss

    @classmethod
    def losses_reported(cls) -> tuple[str, ...]:
        """The loss metrics that a runner reports, as means over steps: the task's own loss, and the term that
        `loss` adds to it."""
        return ("train_loss",) if cls.is_plain() else ("train_loss", "surrogate_loss")

    @classmethod
    def has_step(cls) -> bool:
        """Whether `step` replaces `client.optimizer`."""
        return cls.step is not Algorithm.step

    @classmethod
    def evaluates_start(cls) -> bool:
        """Whether the runner evaluates the model on the client's training rows before the first step."""
        return cls.start_loss or cls.start_gradient

    @classmethod
    def reads_start(cls) -> bool:
        """Whether its steps may read the model from the start of the round."""
        return not cls.is_plain() or cls.has_step() or cls.evaluates_start()

    @classmethod
    def transient_state(cls) -> tuple[str, ...]:
        """The `step_state` that a client does not keep between rounds."""
        return tuple(space for space in cls.step_state if space not in cls.client_state)

    @classmethod
    def adds_nothing(cls) -> bool:
        """Whether a client keeps and sends its trained parameters and nothing else."""
        return cls.finish is Algorithm.finish

    @classmethod
    def has_arrays(cls) -> bool:
        return bool(cls.from_server or cls.client_state or cls.to_server)


def squared_distance(parameters: Parameters, anchor: Parameters) -> Tensor:
    """‖w − a‖² over the names of `anchor`."""
    return torch.stack([(parameters[name] - anchor[name]).square().sum() for name in anchor]).sum()
