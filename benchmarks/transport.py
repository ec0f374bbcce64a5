"""Milliseconds per MB and client to send a model out, get it back and average it, without training.

Flower's simulation with its standard FedAvg, against ours in process. The client adds one to every array, so
that each round's model is new to it. One MB of model is counted once, though it travels both ways.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import Spread, arguments, blank_model, interleave, ratio, show, spread, write_result
from echo import Told, run_echo

from fedfrozen_app.runtimes.flower.simulation import run_app

CASES = ((0.03, 4), (0.03, 10), (6.5, 4), (6.5, 10), (50.0, 4))  # MB, clients
LARGE = (330.0, 4)
GOAL = 5


@dataclass(frozen=True)
class Echo:
    """Seconds of each round, and those of them that went into the average."""

    rounds: list[float]
    aggregate: list[float]

    def later(self) -> tuple[float, float]:
        """Mean seconds of a round, with and without aggregation, but for the first, which starts workers."""
        whole, averaging = sum(self.rounds[1:]), sum(self.aggregate[1:])
        count = len(self.rounds) - 1
        return whole / count, (whole - averaging) / count


def ours(megabytes: float, clients: int, rounds: int) -> Echo:
    began: list[float] = []
    ended: list[float] = []
    told = Told(lambda _: began.append(time.perf_counter()), lambda _: ended.append(time.perf_counter()))
    rows = run_echo(megabytes, clients, rounds, told)
    return Echo(
        [after - before for before, after in zip(began, ended, strict=True)],
        [row["seconds"]["aggregate"] for row in rows],
    )


def flower(megabytes: float, clients: int, rounds: int) -> Echo:
    sizes = [tensor.numel() for tensor in blank_model(megabytes).values()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings: dict[str, Any] = {
            "sizes": json.dumps(sizes),
            "result": str(folder / "result.json"),
            "rounds": rounds,
            "clients": clients,
        }
        app = Path(__file__).parent / "flower_echo"
        run_app(app, settings, num_supernodes=clients, work_dir=folder / "work")
        result = json.loads((folder / "result.json").read_text())
    return Echo([after - before for before, after in pairwise(result["marks"])], result["aggregate"])


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="the first is not counted")
    parser.add_argument("--large", action="store_true", help="also a model of 330 MB")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help=f"of {CASES}")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more: the first is not counted")

    cases = [CASES[number] for number in options.cases] + ([LARGE] if options.large else [])
    turns: dict[str, Callable[[], Echo]] = {}
    for megabytes, clients in cases:
        turns[label("ours", megabytes, clients)] = partial(ours, megabytes, clients, options.rounds)
        turns[label("flower", megabytes, clients)] = partial(flower, megabytes, clients, options.rounds)

    def tell(number: int, name: str, echo: Echo) -> None:
        print(f"{number + 1}/{options.repeats} {name}: {1000 * echo.later()[0]:.1f} ms a round", flush=True)

    found = interleave(turns, options.repeats, tell)

    figures, rows, checks = [], [], {}
    for megabytes, clients in cases:
        both = (found[label(who, megabytes, clients)] for who in ("ours", "flower"))
        figure = judge(megabytes, clients, *both)
        figures.append(figure)
        name = f"{megabytes:g}_MB_{clients}_clients_{GOAL}_times_less"
        checks[f"{name}_transport"] = figure["times_less_without_aggregation"].median >= GOAL
        checks[f"{name}_with_the_average"] = figure["times_less"].median >= GOAL
        rows.append(row(figure))
    setting = {"rounds": options.rounds, "repeats": options.repeats}
    path = write_result("transport", {"setting": setting, "figures": figures, "checks": checks})
    columns = ("model, MB", "clients", "ours", "Flower", "times less", "without aggregation")
    show("Transport, ms per MB and client: median (range)", columns, rows, checks, path)


def judge(megabytes: float, clients: int, ours: list[Echo], flower: list[Echo]) -> dict[str, Any]:
    figure: dict[str, Any] = {"megabytes": megabytes, "clients": clients}
    unit = 1000 / megabytes / clients
    for number, kind in enumerate(("", "_without_aggregation")):
        mine, theirs = ([echo.later()[number] for echo in who] for who in (ours, flower))
        figure[f"ours_ms_per_mb_and_client{kind}"] = spread([unit * seconds for seconds in mine])
        figure[f"flower_ms_per_mb_and_client{kind}"] = spread([unit * seconds for seconds in theirs])
        figure[f"times_less{kind}"] = ratio(theirs, mine)
    return figure


def row(figure: dict[str, Any]) -> tuple[str, ...]:
    def text(value: Spread) -> str:
        return f"{value:.1f}" if value.median >= 10 else f"{value:.2f}"

    each = [text(figure[f"{who}_ms_per_mb_and_client"]) for who in ("ours", "flower")]
    times = [text(figure[f"times_less{kind}"]) for kind in ("", "_without_aggregation")]
    return (f"{figure['megabytes']:g}", str(figure["clients"]), *each, *times)


def label(who: str, megabytes: float, clients: int) -> str:
    return f"{who}, {megabytes:g} MB, {clients} clients"


if __name__ == "__main__":
    main()
