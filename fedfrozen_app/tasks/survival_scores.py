"""Survival metrics: Harrell's C-index and the integrated Brier score."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def harrell_c(time: ArrayLike, event: ArrayLike, risk: ArrayLike) -> float:
    """Harrell's C: among comparable pairs, the share in which the person with the earlier event had the
    higher risk; equal risks count half. NaN without such a pair.

    A person censored at the time of an event outlived it; pairs of simultaneous events are not comparable.
    Takes O(n log n) for n people.
    """
    times, events, risks = _checked(time, event, risk)
    # Numbered in descending order of time, at equal times the censored first: people with lower numbers
    # outlived those with higher ones.
    _, latest_first = np.unique(-times, return_inverse=True)
    order = latest_first * 2 + events
    _, number = np.unique(order, return_inverse=True)
    _, rank = np.unique(risks, return_inverse=True)
    below, tied, pairs = _outlived(number, rank, events)
    return (below + tied / 2) / pairs if pairs else float("nan")


def _checked(time: ArrayLike, event: ArrayLike, risk: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    times, risks = np.asarray(time, dtype=float).ravel(), np.asarray(risk, dtype=float).ravel()
    events = np.asarray(event).astype(bool).ravel()
    if not len(times) == len(events) == len(risks):
        raise ValueError(
            f"{len(times)} times, {len(events)} events and {len(risks)} risks are not of one length"
        )
    if not (np.isfinite(times).all() and np.isfinite(risks).all()):
        raise ValueError("a time or a risk is not a finite number")
    return times, events, risks


def _outlived(number: np.ndarray, rank: np.ndarray, events: np.ndarray) -> tuple[int, int, int]:
    """Counts over all pairs (i with the event, j with a lower number): j ranked below i, equal to i, and all.

    People are split by the bits of their numbers, the highest bit first, and remain sorted by rank: each pair
    is split at one bit, where j has 0 and i has 1.
    """
    below = tied = pairs = 0
    order = np.argsort(rank, kind="stable")
    for bit in reversed(range(int(number.max(initial=0)).bit_length())):
        part, ranks = number[order] >> (bit + 1), rank[order]
        one = (number[order] >> bit & 1).astype(bool)
        zeros = np.concatenate([[0], np.cumsum(~one)])
        start = _starts(part[1:] != part[:-1])
        change = (part[1:] != part[:-1]) | (ranks[1:] != ranks[:-1])
        low, high = _starts(change), _ends(change)
        end = _ends(part[1:] != part[:-1])
        asked = one & events[order]
        below += int((zeros[low] - zeros[start])[asked].sum())
        tied += int((zeros[high] - zeros[low])[asked].sum())
        pairs += int((zeros[end] - zeros[start])[asked].sum())
        order = order[np.argsort(part * 2 + one, kind="stable")]
    return below, tied, pairs


def _starts(change: np.ndarray) -> np.ndarray:
    """(people,) the start of each person's run of equal people; `change` marks the ends of runs."""
    places = np.arange(len(change) + 1)
    return np.maximum.accumulate(np.where(np.concatenate([[True], change]), places, 0))


def _ends(change: np.ndarray) -> np.ndarray:
    """(people,) one past the end of each person's run."""
    places = np.arange(1, len(change) + 2)
    last = np.where(np.concatenate([change, [True]]), places, len(change) + 1)
    return np.minimum.accumulate(last[::-1])[::-1]


def censoring_curve(time: np.ndarray, event: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(times, share not yet censored just after each), the Kaplan-Meier estimate; an event comes before a
    censoring at the same time."""
    times, place = np.unique(time, return_inverse=True)
    events = np.bincount(place, weights=event, minlength=len(times))
    left = np.bincount(place, minlength=len(times))
    at_risk = len(time) - np.concatenate([[0], np.cumsum(left)[:-1]]) - events
    share = np.divide(left - events, at_risk, out=np.zeros(len(times)), where=at_risk > 0)
    return times, np.cumprod(1.0 - share)


def brier(
    train_time: ArrayLike,
    train_event: ArrayLike,
    time: ArrayLike,
    event: ArrayLike,
    survival: ArrayLike,
    times: ArrayLike,
) -> np.ndarray:
    """(times,) mean squared error of `survival`, (people, times), with inverse-probability-of-censoring
    weights from the training rows (Graf et al. 1999)."""
    known, observed, _ = _checked(train_time, train_event, train_time)
    own, happened, _ = _checked(time, event, time)
    predicted, at = _curves(survival, times, len(own))
    if len(at) and (at.min() < own.min() or at.max() >= own.max()):
        raise ValueError(
            f"the times must lie in [{own.min():g}, {own.max():g}), where the test rows are followed"
        )
    if censoring_curve(known, observed)[1][-1] > 0 and own.max() > known.max():
        raise ValueError(
            f"a test row is followed beyond {known.max():g}, where the train rows end: cut its time there"
        )
    return _weighted_errors(known, observed, own, happened, predicted, at)


def _curves(survival: ArrayLike, times: ArrayLike, people: int) -> tuple[np.ndarray, np.ndarray]:
    predicted, at = np.asarray(survival, dtype=float), np.asarray(times, dtype=float)
    if predicted.shape != (people, len(at)):
        raise ValueError(
            f"survival has the shape {predicted.shape}, not one row a person and one column a time"
        )
    return predicted, at


def _weighted_errors(
    known: np.ndarray,
    observed: np.ndarray,
    own: np.ndarray,
    happened: np.ndarray,
    predicted: np.ndarray,
    at: np.ndarray,
) -> np.ndarray:
    """(times,) `brier` of checked arguments."""
    steps, free = censoring_curve(known, observed)
    curve = np.concatenate([[1.0], free])
    by_time = curve[np.searchsorted(steps, at, side="right")]
    by_person = curve[np.searchsorted(steps, own, side="right")]
    weight_case = np.divide(1.0, by_person, out=np.zeros(len(own)), where=by_person > 0)
    weight_control = np.divide(1.0, by_time, out=np.zeros(len(at)), where=by_time > 0)
    case = (own[:, None] <= at) & happened[:, None]
    control = own[:, None] > at
    error = predicted**2 * case * weight_case[:, None] + (1.0 - predicted) ** 2 * control * weight_control
    return error.mean(axis=0)


def integrated_brier(
    train_time: ArrayLike,
    train_event: ArrayLike,
    time: ArrayLike,
    event: ArrayLike,
    survival: ArrayLike,
    times: ArrayLike,
) -> float:
    """The mean Brier score over the span of `times`, which must increase, by the trapezoidal rule."""
    at = np.asarray(times, dtype=float)
    if len(at) < 2 or (np.diff(at) <= 0).any():
        raise ValueError("the times must increase, and be two or more")
    found = brier(train_time, train_event, time, event, survival, at)
    return float(np.trapezoid(found, at) / (at[-1] - at[0]))


def brier_of_site(
    train_time: ArrayLike,
    train_event: ArrayLike,
    time: ArrayLike,
    event: ArrayLike,
    survival: ArrayLike,
    times: ArrayLike,
) -> float:
    """The same over one span for all sites, whose rows may end earlier: follow-up beyond the last time is cut
    to it."""
    known, observed, _ = _checked(train_time, train_event, train_time)
    own, happened, _ = _checked(time, event, time)
    predicted, at = _curves(survival, times, len(own))
    end = np.nextafter(at[-1], np.inf)
    happened, own = happened & (own <= at[-1]), np.minimum(own, end)
    found = _weighted_errors(known, observed, own, happened, predicted, at)
    return float(np.trapezoid(found, at) / (at[-1] - at[0]))


def baseline_hazard(time: ArrayLike, event: ArrayLike, risk: ArrayLike, times: ArrayLike) -> np.ndarray:
    """(times,) Breslow's cumulative baseline hazard, of a person with risk 0; risks are logarithms."""
    known, observed, risks = _checked(time, event, risk)
    moments, place = np.unique(known, return_inverse=True)
    events = np.bincount(place, weights=observed, minlength=len(moments))
    shift = risks.max(initial=0.0)  # exp() of a large risk would overflow
    leaving = np.bincount(place, weights=np.exp(risks - shift), minlength=len(moments))
    at_risk = np.cumsum(leaving[::-1])[::-1]
    steps = np.divide(events, at_risk, out=np.zeros(len(moments)), where=events > 0) * np.exp(-shift)
    hazard = np.concatenate([[0.0], np.cumsum(steps)])
    return np.asarray(hazard[np.searchsorted(moments, np.asarray(times, dtype=float), side="right")])
