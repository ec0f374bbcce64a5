"""The optimiser of a stacked step: updates the rows of all slots from their gradients."""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedfrozen_app.config import ClientConfig
from fedfrozen_app.exchange.block import Layout
from fedfrozen_app.exchange.names import namespace_of, parameter_of
from fedfrozen_app.local.algorithm import Algorithm
from fedfrozen_app.local.client_optimizer import Roles, make_optimizer, rate_scales
from fedfrozen_app.local.step_arrays import StepArrays
from fedfrozen_app.vmap.factored_gradients import Factors, descend

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

DESCENT_ON = ("cuda",)  # devices where gradients of wide layers stay factored (vmap/factored_gradients.py)


class StepOptimizer:
    """Updates `arrays.rows` in place, each client with a fresh optimiser state."""

    def __init__(self, worker: "Worker", arrays: StepArrays, layout: Layout, runs: int) -> None:
        self._settings, self._arrays, self._layout = worker.config.client, arrays, layout
        self._on_gpu = worker.device.type == "cuda"
        # (width,) the learning rate of each column in units of `client.lr`; None if all are 1.
        self._shares = rate_shares(self._settings, worker.roles, layout, arrays.rows)
        self._clip_spans = clip_spans(layout)
        # A CUDA graph replays fixed addresses, so the rate is a tensor that later rounds change in place.
        self._rates = torch.ones(runs, device=worker.device)
        self._lr = self._rates.unbind()
        rates: Sequence[Any] = self._lr if self._on_gpu else [1.0] * runs
        each = arrays.size // runs
        groups = [
            {"params": arrays.row_list[run * each : (run + 1) * each], "lr": rate}
            for run, rate in enumerate(rates)
        ]
        self._optimizer = make_optimizer(self._settings, groups, rates[0], capturable=self._on_gpu)

    def set_rate(self, run: int, rate: float) -> None:
        self._lr[run].fill_(rate)
        if not self._on_gpu:
            self._optimizer.param_groups[run]["lr"] = rate

    def reset(self, slots: Collection[int]) -> None:
        """Reset the optimiser of clients that enter these slots."""
        states = [self._optimizer.state[self._arrays.row_list[slot]] for slot in slots]
        kept = [v for state in states for v in state.values() if isinstance(v, Tensor)]
        if kept:
            with torch.no_grad():
                torch._foreach_zero_(kept)

    def is_plain_descent(self, worker: "Worker", method: Algorithm) -> bool:
        """Whether a step is just rows − rate · gradient, so that gradients may stay factored."""
        client = self._settings
        remembers = client.optimizer != "sgd" or client.momentum or client.weight_decay
        changes = client.clip is not None or self._shares is not None or self._arrays.columns is not None
        rounds = bool(worker.rounded) or worker.task.dtype != self._rates.dtype
        on = worker.device.type in DESCENT_ON
        return on and not method.reads_start() and not (remembers or changes or rounds)

    def apply_gradients(self, gradient: Tensor) -> None:
        """Take one optimiser step of all slots. `gradient`: (slots, width), changed in place."""
        arrays, columns = self._arrays, self._arrays.columns
        # A captured step writes the same memory at every replay: keep it alive.
        for row, own in zip(arrays.row_list, gradient.unbind(), strict=True):
            row.grad = own
        if columns is not None:
            gradient.mul_(columns)
        clip_rows(gradient, self._settings.clip, self._clip_spans)
        shares = self._shares
        if columns is not None:
            shares = columns if shares is None else columns * shares
        before = None if shares is None else arrays.rows.clone()
        self._optimizer.step()
        if before is not None and shares is not None:
            # A k times larger rate makes a k times larger step, for SGD and AdamW; 0 makes none.
            arrays.rows.copy_(before.lerp(arrays.rows, shares))

    @torch.no_grad()
    def apply_factored(self, gradients: Mapping[str, Tensor], factors: Mapping[str, Factors]) -> None:
        """rows −= rate · gradient for each parameter; from its factors if the gradient is factored."""
        parts = self._layout.views(self._arrays.rows)
        rates = self._rates.repeat_interleave(self._arrays.size // len(self._rates))
        for name, gradient in gradients.items():
            each = rates.view(-1, *(1 for _ in gradient.shape[1:]))
            parts[name].addcmul_(gradient, each, value=-1)
        for name, both in factors.items():
            descend(parts[name], both, self._rates)


def clip_spans(layout: Layout) -> list[int]:
    """The number of columns of the parameters, and of each further trained namespace."""
    spaces = groupby(zip(layout.names, layout.spans, strict=True), lambda c: namespace_of(c[0]))
    return [sum(span for _, span in columns) for _, columns in spaces]


def clip_rows(gradient: Tensor, clip: float | None, spans: Sequence[int]) -> None:
    """Like torch.nn.utils.clip_grad_norm_, for each client separately."""
    if clip is None:
        return
    for part in gradient.split(list(spans), dim=1):
        norm = torch.linalg.vector_norm(part, dim=1, keepdim=True)
        part.mul_((clip / (norm + 1e-6)).clamp(max=1.0))


def rate_shares(settings: ClientConfig, roles: Roles, layout: Layout, like: Tensor) -> Tensor | None:
    """(width,) the learning rate of each column in units of `client.lr`; None if all are 1."""
    scales = rate_scales(settings)
    shares = [scales.get(roles[parameter_of(name)].kind, 1.0) for name in layout.names]
    if set(shares) <= {1.0}:
        return None
    spans = zip(shares, layout.spans, strict=True)
    # In float64 until the end: float32 would round a scale of 0.2 in a float64 model too.
    whole = [torch.full((span,), scale, dtype=torch.float64) for scale, span in spans]
    return torch.cat(whole).to(like)
