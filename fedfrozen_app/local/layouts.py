"""How a client's arrays are laid out in flat rows, so that the clients of a cohort can be stacked."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfrozen_app.exchange.block import Layout
from fedfrozen_app.exchange.names import (
    by_namespace,
    is_parameter,
    names_in_namespaces,
    namespace_of,
    parameter_of,
    with_namespace,
)
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.models.task import Parameters

NO_START = Start({}, ())  # for plain training, which reads no start
# Namespaces of a client's start: its private parameters, and its loss and gradient if requested.
START, START_LOSS, START_GRADIENT = "start", "start_loss", "start_gradient"


@dataclass(frozen=True)
class Layouts:
    """The layouts of a client's trained row, of its read-only row, and of the row that all clients share."""

    trained: Layout  # parameters, and the algorithm's trainable state and step state
    held: Layout  # client state and private parameters: untrained, or from the start of the round
    from_server: Layout  # the arrays of the train request: the same for all clients
    names: tuple[str, ...]  # the parameters among `trained`

    @classmethod
    def of(cls, parameters: Parameters, request: TrainRequest, names: tuple[str, ...]) -> "Layouts":
        """`names` are the trained parameters, the shared ones first."""
        method, plan = request.method, request.plan
        changing = (*method.trainable_state, *method.step_state)
        kept = [space for space in method.client_state if space not in changing]
        began = [name for name in plan.private if name not in names or method.reads_start()]
        return cls(
            trained=_layout(parameters, [*names, *names_in_namespaces(changing, names)]),
            held=_layout(
                parameters,
                [
                    *names_in_namespaces(kept, names),
                    *names_in_namespaces([START], began),
                    *(names_in_namespaces([START_LOSS], names[:1]) if method.start_loss else ()),
                    *(names_in_namespaces([START_GRADIENT], names) if method.start_gradient else ()),
                ],
                (*method.scalar_state, START_LOSS),
            ),
            from_server=_layout(parameters, names_in_namespaces(method.from_server, plan.shared)),
            names=names,
        )

    def untrained(self, held: Tensor) -> dict[str, Tensor]:
        """The client's private parameters that are not trained."""
        private = by_namespace(self.held.views(held)).get(START, {})
        return {name: value for name, value in private.items() if name not in self.names}

    def start(self, model: Parameters, row: Tensor, held: Tensor, from_server: Tensor) -> Start:
        """One client's start from its rows. Trainable state and step state have their current values."""
        own = by_namespace(self.held.views(held)) | by_namespace(self.trained.views(row))
        private, loss, gradient = (own.pop(space, {}) for space in (START, START_LOSS, START_GRADIENT))
        received = by_namespace(self.from_server.views(from_server))
        value = next(iter(loss.values()), None)
        return Start({**model, **private}, self.names, received, own, value, gradient or None)

    def start_values(self, loss: Tensor | None, gradient: Parameters | None) -> dict[str, Tensor]:
        """A client's loss and gradient at its start, by their names in `held`."""
        found = {} if loss is None else {with_namespace(START_LOSS, self.names[0]): loss}
        return found | {
            with_namespace(START_GRADIENT, name): value for name, value in (gradient or {}).items()
        }


def _layout(parameters: Parameters, names: Sequence[str], scalars: Collection[str] = ()) -> Layout:
    """Arrays with the shapes of their parameters; in the namespaces `scalars`, one number each."""
    arrays = {name: parameters[parameter_of(name)] for name in names}
    one = torch.zeros(())
    return Layout.of({name: one if namespace_of(name) in scalars else a for name, a in arrays.items()})


def loaded_row(parameters: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """(width,) these parameters as a row: the start of a client without kept arrays. Others are zero."""
    arrays = {name: parameters[parameter_of(name)] for name in layout.names}
    return layout.flatten(
        {name: array if is_parameter(name) else torch.zeros_like(array) for name, array in arrays.items()}
    )
