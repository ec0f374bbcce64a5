"""Survival targets with censoring: the Cox model and a discrete-time model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.tasks.regression import number
from fedfrozen_app.tasks.survival_scores import baseline_hazard, brier_of_site, harrell_c
from fedfrozen_app.tasks.target import Target

PAIRS = 2**24  # pairs of rows compared at once
YES, NO = {"1", "1.0", "true", "yes"}, {"0", "0.0", "false", "no"}
EVENT, CENSORED = "event", "censored"
SPAN = np.linspace(0.1, 0.9, 33)  # event quantiles at which curves are scored
LARGEST = float(np.finfo(np.float64).max)


@dataclass(frozen=True)
class Reference:
    """The reference for Brier weights, and for turning a Cox model's risks into survival curves."""

    time: np.ndarray
    event: np.ndarray
    times: np.ndarray  # at which curves are scored
    hazard: np.ndarray | None  # the baseline's, at these times; None if unknown


class Cox(Target):
    """The Cox model: partial likelihood within the batch, ties by Breslow or Efron; metric: Harrell's C.

    Labels are (rows, 2): time, and 1 where the event was observed at it. The loss is the sum over events
    divided by the batch's rows. A larger logit is a larger hazard.
    """

    headline, title = "c_index", "C-index"
    metric_names = ("c_index",)
    has_classes = fair = per_example = False
    by_site = needs_reference = time_to_event = True
    intercept = False  # a constant cancels: only rounding noise would train a bias

    def outputs(self, classes: Sequence[str]) -> int:
        return 1

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(examples,): each example's term of the batch's likelihood, which depends on the others."""
        return self._parts(logits, labels, torch.ones_like(logits[:, 0]))

    def batch_loss(
        self, logits: Tensor, labels: Tensor, class_weights: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        real = torch.ones_like(logits[:, 0]) if mask is None else mask.to(logits)
        return self._parts(logits, labels, real).sum() / real.sum().clamp(min=1)

    def _parts(self, logits: Tensor, labels: Tensor, real: Tensor) -> Tensor:
        """(rows,): log Σ_risk exp(s) − s of each event, 0 for all other rows; padding is ignored."""
        scores, times, events = logits[:, 0], labels[:, 0], labels[:, 1].to(logits) * real
        step = max(1, PAIRS // max(len(scores), 1))
        found = [
            self._log_risk(scores, times, events, real, slice(start, start + step))
            for start in range(0, len(scores), step)
        ]
        return events * (torch.cat(found) - scores)

    def _log_risk(self, scores: Tensor, times: Tensor, events: Tensor, real: Tensor, part: slice) -> Tensor:
        """(rows of the part,): the logarithm of each row's risk-set sum."""
        own = times[part, None]
        itself = torch.arange(len(times), device=times.device)
        me = itself[part, None] == itself
        at_risk = ((times >= own) & (real > 0)) | me  # padding is at risk only in its own row
        lowest = torch.finfo(scores.dtype).min
        most = torch.where(at_risk, scores.detach(), lowest).amax(dim=1, keepdim=True)
        each = torch.where(at_risk, (torch.where(at_risk, scores - most, 0.0)).exp(), 0.0)  # (part, rows)
        total = each.sum(dim=1)
        if self.settings.get("ties", "breslow") == "efron":
            tied = (times == own) & (events > 0)
            count = tied.sum(dim=1).clamp(min=1)
            before = (tied & (itself < itself[part, None])).sum(dim=1)
            total = total - before.to(total) / count * torch.where(tied, each, 0.0).sum(dim=1)
        return total.log() + most[:, 0]

    def predictions(self, logits: Tensor) -> Tensor:
        return logits[..., 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        raise UserError("A survival model has no probabilities of classes.")

    def measure(self, predicted: Tensor, labels: Tensor, classes: tuple[str, ...]) -> dict[str, float]:
        time, event = (labels[:, column].cpu().numpy() for column in (0, 1))
        found = harrell_c(time, event, predicted.double().cpu().numpy())
        return {} if np.isnan(found) else {"c_index": found}  # no comparable pair of rows

    def reference(self, logits: Tensor | None, labels: Tensor) -> Reference | None:
        time, event = (labels[:, column].cpu().numpy() for column in (0, 1))
        times = self._horizon(time[event > 0])
        if len(times) < 2:
            return None
        return Reference(time, event, times, None if logits is None else self._hazard(logits, labels, times))

    def _horizon(self, times: np.ndarray) -> np.ndarray:
        """The times at which curves are scored: up to the 90 % quantile of event times."""
        return np.unique(np.quantile(times, SPAN)) if len(times) else times

    def _hazard(self, logits: Tensor, labels: Tensor, times: np.ndarray) -> np.ndarray | None:
        time, event = (labels[:, column].cpu().numpy() for column in (0, 1))
        return baseline_hazard(time, event, self.predictions(logits).double().cpu().numpy(), times)

    def _survival(self, logits: Tensor, reference: Reference) -> np.ndarray | None:
        """(rows, times): the predicted share without the event; None without a baseline hazard."""
        if reference.hazard is None:
            return None
        risk = self.predictions(logits).double().cpu().numpy()
        with np.errstate(over="ignore"):  # survival 0 for huge risks: exp(-inf) is 0
            return np.asarray(np.exp(-np.exp(risk)[:, None] * reference.hazard))

    def site_scores(self, logits: Tensor, labels: Tensor, reference: Reference) -> dict[str, float]:
        survival = self._survival(logits, reference)
        if survival is None or not len(labels):
            return {}
        time, event = (labels[:, column].cpu().numpy() for column in (0, 1))
        found = brier_of_site(reference.time, reference.event, time, event, survival, reference.times)
        return {"brier": found} if np.isfinite(found) else {}

    def hazard_until(self, logits: np.ndarray, times: np.ndarray) -> np.ndarray:
        """(rows,): each row's predicted cumulative hazard at its own time, under a baseline hazard of 1."""
        return np.asarray(np.minimum(times * _exp(logits[:, 0]), LARGEST))

    def time_of_hazard(self, logits: np.ndarray, hazard: float) -> np.ndarray:
        """(rows,): the inverse, the time at which each row's cumulative hazard reaches `hazard`."""
        return np.asarray(hazard / _exp(logits[:, 0]))

    def names_in(self, label: Any) -> list[str]:
        return []

    def class_names(self, named: Any, *, in_order: bool) -> tuple[str, ...]:
        return ()

    def numbered(self, labels: Sequence[Any], places: Mapping[str, int]) -> Tensor:
        return torch.tensor([list(label) for label in labels], dtype=torch.float64).reshape(-1, 2)

    def label_shape(self, classes: int, tokens: int, side: int = 0) -> tuple[int, ...]:
        return (2,)

    def strata(self, labels: Sequence[Any]) -> list[str]:
        return [EVENT if event else CENSORED for _, event in labels]

    def stratum_names(self, classes: tuple[str, ...], found: Iterable[str]) -> tuple[str, ...]:
        return (EVENT, CENSORED)

    def label_columns(self, dataset: Any) -> tuple[str, ...]:
        for key in ("time_column", "event_column"):
            if getattr(dataset, key) is None:
                raise UserError(f"dataset.{key} is missing: dataset.task=survival needs the column's name.")
        return (dataset.time_column, dataset.event_column)

    def read_label(self, cells: Sequence[Any], columns: Sequence[str], origin: str) -> Any:
        time, event = number(cells[0], columns[0], origin), _event(cells[1], columns[1], origin)
        if time is None or event is None:
            return None
        if time < 0:
            raise UserError(
                f"The time in {origin} is {time:g}, below 0: times in {columns[0]!r} count from a person's "
                "own start."
            )
        return (time, event)

    def chosen(self, labels: Sequence[Any], dataset: Any) -> dict[str, Any]:
        if not any(event for _, event in labels):
            raise UserError(
                f"No train row has an event in column {dataset.event_column!r}: there is nothing to learn; "
                "is 1 "
                "the event, and 0 a person who was followed up without one?"
            )
        return {"ties": dataset.ties}


class DiscreteTime(Cox):
    """Discrete-time survival: one logistic hazard per interval (Andreux et al. 2020, arXiv 2006.08997).

    The loss is a sum over rows. A row counts in the intervals of its full follow-up, and in that of its
    event.
    """

    per_example = intercept = True

    @property
    def _edges(self) -> list[float]:
        return [float(edge) for edge in self.settings["edges"]]

    def outputs(self, classes: Sequence[str]) -> int:
        return len(self._edges)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        times, events = labels[..., 0, None], labels[..., 1, None]  # (examples, 1)
        ends = torch.tensor(self._edges, dtype=labels.dtype, device=labels.device)
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])
        inside = (times <= ends) & ((times > begins) | (begins == 0))
        happened = inside & (events > 0)
        counts = (times >= ends) | happened
        each = functional.binary_cross_entropy_with_logits(logits, happened.to(logits), reduction="none")
        return torch.where(counts, each, 0.0).sum(dim=-1)

    def batch_loss(
        self, logits: Tensor, labels: Tensor, class_weights: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        return Target.batch_loss(self, logits, labels, None, mask)

    def predictions(self, logits: Tensor) -> Tensor:
        """Minus the mean event-free time, up to the last edge."""
        ends = torch.tensor(self._edges, dtype=logits.dtype, device=logits.device)
        widths = torch.diff(ends, prepend=ends.new_zeros(1))
        return -(functional.logsigmoid(-logits).cumsum(dim=-1).exp() * widths).sum(dim=-1)

    def _horizon(self, times: np.ndarray) -> np.ndarray:
        found = super()._horizon(times)
        return np.asarray(found[found <= self._edges[-1]])

    def _hazard(self, logits: Tensor, labels: Tensor, times: np.ndarray) -> None:
        """None: its curves need no baseline."""

    def _survival(self, logits: Tensor, reference: Reference) -> np.ndarray:
        """Survival curves, linear between edges."""
        at_edges = functional.logsigmoid(-logits.double()).cumsum(dim=-1).exp().cpu().numpy()
        edges = [0.0, *self._edges]
        curves = [np.interp(reference.times, edges, [1.0, *row]) for row in at_edges]
        return np.array(curves).reshape(len(at_edges), len(reference.times))

    def hazard_until(self, logits: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Linear between edges. Nothing is predicted after the last edge: rows that reach it get LARGEST."""
        edges, sums = np.array([0.0, *self._edges]), _hazards(logits)
        part = np.searchsorted(edges[1:-1], times, side="right")
        rows = np.arange(len(times))
        share = (times - edges[part]) / np.diff(edges)[part]
        found = sums[rows, part] + share * (sums[rows, part + 1] - sums[rows, part])
        return np.where(times >= edges[-1], LARGEST, found)

    def time_of_hazard(self, logits: np.ndarray, hazard: float) -> np.ndarray:
        """The time of this hazard; the last edge if a row's hazard stays below."""
        edges, sums = np.array([0.0, *self._edges]), _hazards(logits)
        part = (sums[:, 1:-1] < hazard).sum(axis=1)
        rows = np.arange(len(sums))
        steps = sums[rows, part + 1] - sums[rows, part]
        flat = (sums[rows, part] < hazard).astype(float)
        share = np.divide(hazard - sums[rows, part], steps, out=flat, where=steps > 0)
        return np.asarray(edges[part] + np.clip(share, 0.0, 1.0) * np.diff(edges)[part])

    def chosen(self, labels: Sequence[Any], dataset: Any) -> dict[str, Any]:
        """The configured edges, or edges with about equally many events per interval."""
        super().chosen(labels, dataset)
        edges = dataset.time_edges
        if edges is None:
            times = [time for time, event in labels if event and time > 0]
            shares = np.arange(1, dataset.intervals + 1) / dataset.intervals
            edges = np.unique(np.quantile(times, shares)) if times else []
        edges = [float(edge) for edge in edges]
        if not edges or edges[0] <= 0 or any(a >= b for a, b in pairwise(edges)):
            raise UserError(
                f"The intervals end at {edges}: dataset.time_edges must be above 0 and grow, such as "
                "[365,730,1095]."
            )
        return {"edges": edges}


def _exp(risk: np.ndarray) -> np.ndarray:
    """exp, clipped to the range of a float."""
    return np.exp(np.clip(risk, -700.0, 700.0))


def _hazards(logits: np.ndarray) -> np.ndarray:
    """(rows, edges + 1): the cumulative hazard, minus the logarithm of survival, at 0 and each edge."""
    each = np.logaddexp(0.0, logits)
    return np.concatenate([np.zeros((len(each), 1)), each.cumsum(axis=1)], axis=1)


def _event(cell: Any, column: str, origin: str) -> int | None:
    text = str(cell).strip().casefold()
    if text in YES:
        return 1
    if text in NO:
        return 0
    if number(None if cell is None else text, column, origin) is None:
        return None
    raise UserError(
        f"{cell!r} in {origin} is neither 0 nor 1, and column {column!r} says whether the event was seen."
    )
