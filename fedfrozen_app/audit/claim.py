"""Tests a client's claimed epsilon against its record of real rounds and against what the server received.

Every check has one of three verdicts. `EXCEEDED`: the observations would be very unlikely if the claim were
true; the false-positive rate per check is at most one in a thousand (for the canaries' bound, at most one in
twenty). `cannot be told`: too little evidence. `pass`: the check could have failed and did not.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom, chi2, norm

from fedfrozen_app.audit.bound import evaluate_canaries
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.files.uploads import read_upload
from fedfrozen_app.privacy.accountant import epsilon_bounds, merged
from fedfrozen_app.privacy.audit_record import RecordedRound, read_rounds
from fedfrozen_app.privacy.budget import BudgetFile
from fedfrozen_app.privacy.canaries import Canaries

PASS, EXCEEDED, UNDECIDED = "pass", "EXCEEDED", "cannot be told"
DOUBT = 0.001  # the probability that a check fails an honest run
ROUNDING = 0.001  # relative to noise and bound: the error that float32 may add to either


@dataclass(frozen=True)
class Check:
    name: str
    word: str
    found: str
    measured: dict[str, Any]


def check_claim(record: Path, uploads: Path | None, client: str, reported: float | None) -> dict[str, Any]:
    """`record`: the client's record; `uploads`: the server's copies; `reported`: the ε that the client
    published."""
    rounds = read_rounds(record)
    canaries = Canaries.read(record)
    last = rounds[-1].figures
    claim = last.epsilon if reported is None else reported
    checks = [
        check_sent(rounds, uploads, client),
        check_noise(rounds),
        check_clipping(rounds, canaries),
        check_draws(rounds),
        check_accounts(rounds, claim),
        check_canaries(rounds, canaries, last.delta),
    ]
    if (missing := lost_records(record, rounds)) is not None:
        checks.append(missing)
    words = {check.word for check in checks}
    return {
        "client": client,
        "rounds": len(rounds),
        "steps": sum(one.figures.steps for one in rounds),
        "epsilon_claimed": claim,
        "delta": last.delta,
        "privacy_unit": last.unit,
        "verdict": next(word for word in (EXCEEDED, UNDECIDED, PASS) if word in words),
        "checks": {
            check.name: {"word": check.word, "found": check.found, **check.measured} for check in checks
        },
    }


def lost_records(record: Path, rounds: Sequence[RecordedRound]) -> Check | None:
    """Reports paid rounds whose records are missing; None if there are none."""
    budget = BudgetFile(record.parents[1], record.name).read()
    last = max(one.number for one in rounds) if budget is None else budget.rounds
    lost = sorted({*range(1, last + 1)} - {one.number for one in rounds})
    if not lost:
        return None
    names = ", ".join(f"{number}.safetensors" for number in lost)
    found = f"of the rounds paid for, these records are not here: {names}"
    return Check("record", UNDECIDED, found, {"lost": lost})


def check_sent(rounds: Sequence[RecordedRound], uploads: Path | None, client: str) -> Check:
    """What the server received is bit-identical to the result of the recorded steps, or to the round's model
    where a codec omitted an element. Otherwise the other checks would test something that was never sent."""
    compared, wrong = 0, []
    for one in rounds:
        folder = None if uploads is None else uploads / str(one.figures.server_round)
        if folder is None or (found := read_upload(folder, client)) is None:
            continue
        base, sent = ({name: value.numpy() for name, value in part.items()} for part in found)
        compared += 1
        for name, value in sent.items():
            same = value == base[name]
            if name in one.made:
                same |= value == one.made[name]
            if not same.all():
                wrong.append(f"{name} in round {one.figures.server_round}")
    if all(one.figures.masked for one in rounds):
        # Everything in the vector besides those steps counts as noise: anything else is excess noise.
        finding = f"{counted(len(rounds), 'masked vector')} made by the private steps, and noise"
        return Check("sent", PASS, finding, {"rounds": len(rounds), "differ": []})
    measured = {"rounds": compared, "differ": wrong}
    if wrong:
        return Check("sent", EXCEEDED, f"{wrong[0]} is not what the private steps made", measured)
    if not compared:
        return Check("sent", UNDECIDED, "the server's copies of the uploads are not here", measured)
    return Check("sent", PASS, f"{counted(compared, 'upload')} made by the private steps alone", measured)


def check_noise(rounds: Sequence[RecordedRound]) -> Check:
    """The sent values minus the clipped sums have the variance paid for: a two-sided chi-square test.

    Too little variance means missing noise; too much means a sum that was not clipped correctly.
    """
    squares = sum(one.figures.squares for one in rounds)
    count = sum(one.figures.elements for one in rounds)
    low = math.sqrt(squares / chi2.isf(DOUBT / 2, count))
    high = math.sqrt(squares / chi2.ppf(DOUBT / 2, count))
    measured = {"deviation": math.sqrt(squares / count), "low": low, "high": high, "elements": count}
    found = f"its deviation is {measured['deviation']:.4f} times what was paid for ({low:.4f} to {high:.4f})"
    if high < 1 - ROUNDING:
        return Check("noise", EXCEEDED, f"too little: {found}", measured)
    if low > 1 + ROUNDING:
        return Check("noise", EXCEEDED, f"more than noise was sent: {found}", measured)
    return Check("noise", PASS, found, measured)


def check_clipping(rounds: Sequence[RecordedRound], canaries: Canaries) -> Check:
    """Rows contribute to the sent sums as clipped, and a canary contributes at most the bound.

    Rows are tested by regression on their clipped sum. A canary's gradient is ten times the bound, so its
    part of a sum equals the bound, or clipping does not work.
    """
    size = math.sqrt(sum(one.figures.squares for one in rounds) / sum(one.figures.elements for one in rounds))
    noise = size * max(one.figures.claimed.noise for one in rounds)
    length = sum(one.figures.length for one in rounds)
    measured: dict[str, Any] = {}
    if length:
        more, error = sum(one.figures.along for one in rounds) / length, noise / math.sqrt(length)
        measured |= {"rows": 1 + more, "rows_error": error}
        if more - norm.isf(DOUBT) * error > ROUNDING:
            found = f"rows are {1 + more:.3f} (±{error:.3f}) times as much as when they are clipped"
            return Check("clipping", EXCEEDED, found, measured)
    seen = np.concatenate([one.seen[one.there] for one in rounds])
    measured["samples"] = len(seen)
    if len(seen) < 2:
        return Check("clipping", UNDECIDED, f"with {len(canaries)} canaries, none of them sampled", measured)
    mean, error = float(seen.mean()), float(seen.std(ddof=1) / math.sqrt(len(seen)))
    low, high = (mean + sign * norm.isf(DOUBT) * error for sign in (-1, 1))
    measured |= {"contribution": mean, "low": low, "high": high}
    found = f"a canary gives {mean:.3f} times the bound ({low:.3f} to {high:.3f})"
    return Check("clipping", EXCEEDED if low > 1 + ROUNDING else PASS, found, measured)


def check_draws(rounds: Sequence[RecordedRound]) -> Check:
    """Noise is independent between steps, and drawing again does not repeat it."""
    repeats = sorted({name for one in rounds for name in one.figures.repeats})
    products = sum(one.figures.products for one in rounds)
    pairs = sum(one.figures.pairs for one in rounds)
    for one, other in pairwise(rounds):
        if one.first is not None and other.first is not None and len(one.first) == len(other.first):
            products += float(one.first.astype(np.float64) @ other.first)
            pairs += len(one.first)
    measured: dict[str, Any] = {"repeats": repeats, "pairs": pairs}
    if repeats:
        return Check("draws", EXCEEDED, f"the seed reveals: {', '.join(repeats)}", measured)
    # For independent noise of the measured size, a mean product has standard deviation size/√pairs.
    size = sum(one.figures.squares for one in rounds) / sum(one.figures.elements for one in rounds)
    measured["correlation"] = products / (size * pairs) if pairs and size else 0.0
    found = f"one step's noise and the next one's correlate by {measured['correlation']:.5f}"
    wrong = abs(measured["correlation"]) * math.sqrt(pairs) > norm.isf(DOUBT / 2)
    return Check("draws", EXCEEDED if wrong else PASS, found, measured)


def check_accounts(rounds: Sequence[RecordedRound], claim: float) -> Check:
    """Sample sizes and steps match those that epsilon was computed for; and epsilon is recomputed."""
    trials = sum(one.figures.units * one.figures.steps for one in rounds)
    drawn = sum(one.figures.sampled for one in rounds)
    expected = sum(one.figures.units * one.figures.steps * one.figures.claimed.rate for one in rounds)
    taken = [one.figures.claimed._replace(times=one.figures.steps) for one in rounds]
    least, _ = epsilon_bounds(taken, rounds[-1].figures.delta)
    steps = sum(step.times for step in taken)
    measured = {
        "epsilon_of_steps": least,
        "steps": steps,
        "paid": sum(one.figures.claimed.times for one in rounds),
        "sampled": drawn,
        "expected": expected,
    }
    if trials and binom.sf(drawn - 1, trials, min(expected / trials, 1.0)) < DOUBT:
        return Check("accounts", EXCEEDED, f"{drawn} examples in samples, {expected:.0f} paid for", measured)
    if least > claim:
        found = f"the {counted(steps, 'step')} taken cost epsilon {least:.3f} at least"
        return Check("accounts", EXCEEDED, found, measured)
    found = f"{counted(steps, 'step')}, {drawn} examples in samples ({expected:.0f} expected)"
    return Check("accounts", PASS, found, measured)


def check_canaries(rounds: Sequence[RecordedRound], canaries: Canaries, delta: float) -> Check:
    """Tests the privacy curve of the steps paid for, at every δ; another check compares their cost with the
    reported one."""
    paid_for = merged(one.figures.claimed for one in rounds)
    result = evaluate_canaries(np.concatenate([one.seen for one in rounds]), canaries.coins, paid_for, delta)
    could = f"{result.canaries} canaries could show {result.epsilon_most:.2f}"
    guesses = f"{result.right} of {result.guesses} guesses right"
    found = f"{guesses}: epsilon is above {result.epsilon_lower:.2f}; {could}"
    if result.refuted:
        return Check("canaries", EXCEEDED, found, asdict(result))
    if not result.could_refute:
        return Check("canaries", UNDECIDED, f"{could}, less than the claim", asdict(result))
    return Check("canaries", PASS, found, asdict(result))
