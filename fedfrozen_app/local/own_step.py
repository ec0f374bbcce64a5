"""An algorithm's own `step` in place of `client.optimizer`, for one client or for all slots of a step."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.optim import Optimizer

from fedfrozen_app.exchange.names import by_namespace, flattened, parameter_of, parameters_in
from fedfrozen_app.local.algorithm import Algorithm, ByNamespace, Start
from fedfrozen_app.local.layouts import Layouts
from fedfrozen_app.local.step_arrays import StepArrays
from fedfrozen_app.local.step_optimizer import clip_rows, clip_spans
from fedfrozen_app.models.task import Parameters

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


def starting_state(method: Algorithm, start: Start) -> dict[str, dict[str, Tensor]]:
    """The initial `step_state` of a client's round: copies of the kept arrays, or zeros."""
    kept = start.client_state
    return {
        space: {
            name: kept[space][name].detach().clone() if space in kept else torch.zeros_like(value)
            for name, value in start.anchor.items()
        }
        for space in method.step_state
    }


def kept_state(method: Algorithm, start: Start) -> dict[str, Tensor]:
    """By `namespace/name`: the `step_state` that a client keeps, with its current values."""
    kept = [space for space in method.step_state if space in method.client_state]
    return flattened({space: start.client_state[space] for space in kept})


class OwnStep:
    """One client's steps: changes `parameters` and the `step_state` in `start.client_state` in place.

    `phase`: the names trained now. The others get a zero gradient and do not change.
    """

    def __init__(
        self,
        method: Algorithm,
        parameters: Mapping[str, Tensor],
        start: Start,
        rate: float,
        phase: Collection[str],
    ) -> None:
        self._method, self._start, self._phase = method, start, phase
        self._parameters = {name: parameters[name] for name in start.trained}
        first = next(iter(self._parameters.values()))
        self._lr = torch.tensor(rate, dtype=first.dtype, device=first.device)

    def step(self) -> None:
        """Take one step with the parameters' `.grad`."""
        held = {name: value.grad for name, value in self._parameters.items()}
        self.apply({n: torch.zeros_like(self._parameters[n]) if g is None else g for n, g in held.items()})

    @torch.no_grad()
    def apply(self, gradient: Parameters) -> None:
        """Take one step with this gradient."""
        method, start = self._method, self._start
        places = {name: value.detach() for name, value in self._parameters.items()}
        values = {name: value.clone() for name, value in places.items()}
        places |= flattened({space: start.client_state[space] for space in method.step_state})
        state = by_namespace(
            {name: value.clone() for name, value in places.items()}
        )  # the algorithm may return any of them
        new, renewed = method.step(values, gradient, state, start, self._lr)
        arrays = {**new, **flattened(renewed)}
        for name, value in places.items():
            if parameter_of(name) in self._phase:
                value.copy_(arrays[name])


class OwnStepOptimizer(Optimizer):
    """The same as a `torch.optim.Optimizer`, for code that wraps one."""

    def __init__(self, own: OwnStep, parameters: Mapping[str, Tensor], rate: float) -> None:
        super().__init__(list(parameters.values()), {"lr": rate})
        self._own = own

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._own.step()


class StackedOwnStep:
    """The same for all slots of a stacked step, in place of a `StepOptimizer`. The clients' rows hold the
    `step_state` after the parameters."""

    def __init__(
        self, worker: "Worker", arrays: StepArrays, layouts: Layouts, method: Algorithm, runs: int
    ) -> None:
        self._worker, self._arrays, self._layouts, self._method = worker, arrays, layouts, method
        self._clip_spans = clip_spans(layouts.trained)
        # A CUDA graph replays fixed addresses, so the rate is a tensor that later rounds change in place.
        self._rates = torch.ones(runs, dtype=arrays.rows.dtype, device=worker.device)

    def set_rate(self, run: int, rate: float) -> None:
        self._rates[run] = rate

    def reset(self, slots: Collection[int]) -> None:
        """Nothing to do: a client's row contains its state."""

    def is_plain_descent(self, worker: "Worker", method: Algorithm) -> bool:
        return False

    def apply_factored(self, gradients: Mapping[str, Tensor], factors: Mapping[str, object]) -> None:
        raise AssertionError("an algorithm's own step reads whole gradients")

    @torch.no_grad()
    def apply_gradients(self, gradient: Tensor) -> None:
        """Take one step of all slots. `gradient`: (slots, width), changed in place."""
        arrays, columns, layout = self._arrays, self._arrays.columns, self._layouts.trained
        if columns is not None:
            gradient.mul_(columns)
        clip_rows(gradient, self._worker.config.client.clip, self._clip_spans)
        common = {name: value.detach() for name, value in self._worker.parameters.items()}
        each = arrays.size // len(self._rates)
        for run, lr in enumerate(self._rates):
            own = slice(run * each, (run + 1) * each)
            model = {**common, **{name: value[run] for name, value in arrays.models.items()}}
            rows = arrays.rows.detach()[own]
            now = rows.clone()  # a step's outputs may share memory with its inputs
            new = self._stepped(model, arrays.from_server[run], lr, now, gradient[own], arrays.held[own])
            if columns is not None:
                trains = layout.views(columns[own])
                before = layout.views(now)
                new = {name: torch.where(trains[name] > 0, new[name], before[name]) for name in new}
            places = layout.views(rows)
            torch._foreach_copy_([places[name] for name in new], list(new.values()))

    def _stepped(
        self,
        model: Parameters,
        from_server: Tensor,
        lr: Tensor,
        rows: Tensor,
        gradients: Tensor,
        held: Tensor,
    ) -> dict[str, Tensor]:
        """(clients, *shape) by name: the new values of one run's clients."""
        layouts, method = self._layouts, self._method

        def one(row: Tensor, gradient: Tensor, held: Tensor) -> dict[str, Tensor]:
            views = layouts.trained.views(row)
            state: ByNamespace = by_namespace(views)
            start = layouts.start({**model, **layouts.untrained(held)}, row, held, from_server)
            parts = parameters_in(layouts.trained.views(gradient))
            new, renewed = method.step(parameters_in(views), parts, state, start, lr)
            arrays = {**new, **flattened(renewed)}
            return {name: arrays[name] for name in views}

        return vmap(one)(rows, gradients, held)
