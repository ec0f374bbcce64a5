"""What `benchmarks/paced.py` found: virtual times to targets, paired by seed."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cells import quantile

Row = dict[str, Any]
Key = tuple[str, str, str, float]  # study, method, pacing, uplink
Runs = dict[Key, dict[int, Row]]  # by seed
LAST, SMOOTHED, USUAL = 5, 3, 10.0
UPLINKS = (1.0, 10.0, 100.0)


def group(rows: Sequence[Row]) -> Runs:
    """A later row of a cell takes an earlier one's place."""
    found: Runs = {}
    for row in rows:
        if row.get("kind") == "run":
            cell = row["cell"]
            key = (cell["study"], cell["method"], cell["pacing"], float(cell["uplink"]))
            found.setdefault(key, {})[cell["seed"]] = row
    return found


def target_of(row: Row) -> float:
    """The mean of the last evaluations."""
    return statistics.fmean(accuracy for _, _, accuracy in row["curve"][-LAST:])


def time_to(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """The first evaluation whose mean with those before it, three together, is at least the target."""
    for place in range(SMOOTHED - 1, len(curve)):
        window = curve[place - SMOOTHED + 1 : place + 1]
        if statistics.fmean(accuracy for _, _, accuracy in window) >= target:
            return float(curve[place][1])
    return None


def at_uplink(row: Row, uplink: float) -> list[list[float]]:
    """A synchronous run's curve, had every uplink this rate: a round lasts until its slowest reply."""
    scale, ends, now = row["cell"]["uplink"] / uplink, {0: 0.0}, 0.0
    for number, clients in enumerate(row["parts"], start=1):
        now += max(download + train + upload * scale for download, train, upload in clients)
        ends[number] = now
    return [[number, ends[int(number)], accuracy] for number, _, accuracy in row["curve"]]


def ratio(times: Mapping[int, tuple[float | None, float | None]]) -> str:
    """First over second of each seed: geometric mean and 95 % interval, and of how many seeds."""
    both = [(a, b) for a, b in times.values() if a is not None and b is not None]
    logs = [math.log(a / b) for a, b in both if a > 0 and b > 0]
    if not logs:
        return f"none of {len(times)}"
    mean = statistics.fmean(logs)
    text = f"{math.exp(mean):.2f}"
    if len(logs) > 1:
        half = quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        text += f" ({math.exp(mean - half):.2f}-{math.exp(mean + half):.2f})"
    return f"{text}, {len(logs)} of {len(times)}"


def hours(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known) / 3600:.2f}" if known else "-"


def show_all(rows: Sequence[Row]) -> None:
    runs = group(rows)
    for study in sorted({key[0] for key in runs}):
        uplink = next(key[3] for key in runs if key[0] == study and key[2] == "synchronous")
        show_pacings(runs, study, uplink)
        if study != "nvflare":
            show_buffered_links(runs, study)
            show_frozen_bytes(runs, study)


def show_pacings(runs: Runs, study: str, uplink: float) -> None:
    print(f"{study}: virtual hours to the synchronous target; synchronous over paced; staleness")
    for name, method, pacing, link in sorted(key for key in runs if key[0] == study and key[3] == uplink):
        own, plain = runs[name, method, pacing, link], runs.get((study, method, "synchronous", link), {})
        seeds = sorted(own.keys() & plain.keys())
        pairs = {
            seed: (time_to(plain[seed]["curve"], target), time_to(own[seed]["curve"], target))
            for seed, target in ((seed, target_of(plain[seed])) for seed in seeds)
        }
        final = statistics.fmean(target_of(row) for row in own.values())
        stale = statistics.fmean(statistics.fmean(row["staleness"] or [0.0]) for row in own.values())
        print(
            f"  {method:10} {pacing:12} {len(own)} seeds  final {100 * final:5.2f}  "
            f"{hours([b for _, b in pairs.values()]):>6} h  {ratio(pairs):24}  {stale:.2f}"
        )


def show_buffered_links(runs: Runs, study: str) -> None:
    print(f"{study}: synchronous over buffered, by uplink in Mbit/s")
    for method in sorted({key[1] for key in runs if key[0] == study}):
        texts = []
        for uplink in UPLINKS:
            plain = runs.get((study, method, "synchronous", USUAL), {})
            own = runs.get((study, method, "buffered", uplink), {})
            pairs = {}
            for seed in sorted(own.keys() & plain.keys()):
                target = target_of(plain[seed])
                pairs[seed] = (
                    time_to(at_uplink(plain[seed], uplink), target),
                    time_to(own[seed]["curve"], target),
                )
            texts.append(f"{uplink:g}: {ratio(pairs)}")
        print(f"  {method:10} {'   '.join(texts)}")


def show_frozen_bytes(runs: Runs, study: str) -> None:
    """Times of FedFrozen and LoRA over FedAvg's: the same rounds, and to the lower target of the two."""
    print(f"{study}, synchronous: FedAvg's virtual time over the method's, by uplink in Mbit/s")
    plain = runs.get((study, "fedavg", "synchronous", USUAL), {})
    for method in ("fedfrozen", "lora"):
        own = runs.get((study, method, "synchronous", USUAL), {})
        seeds = sorted(own.keys() & plain.keys())
        saved = [1 - own[seed]["bytes_up"] / plain[seed]["bytes_up"] for seed in seeds]
        if not seeds:
            continue
        print(f"  {method}: {statistics.fmean(saved):.1%} of the bytes up are saved")
        for uplink in UPLINKS:
            whole, reached = {}, {}
            for seed in seeds:
                a, b = at_uplink(plain[seed], uplink), at_uplink(own[seed], uplink)
                target = min(target_of(plain[seed]), target_of(own[seed]))
                whole[seed] = (a[-1][1], b[-1][1])
                reached[seed] = (time_to(a, target), time_to(b, target))
            print(f"    {uplink:5g}: same rounds {ratio(whole):24} to the lower target {ratio(reached)}")
