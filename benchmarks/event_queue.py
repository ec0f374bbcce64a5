"""What the event queue of `pacing` costs with many clients: its share of a round.

    python benchmarks/event_queue.py [--clients 10000] [--rounds 6] [KEY=VALUE...]

Rows of a made-up table are spread over the clients, three each, and a linear model trains: the shortest
rounds there are, so that the share of real ones is smaller. Timed is all that a round does before it trains:
draws, the bytes and times of the clients asked, and the queue itself.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common import arguments, ratio, show, spread, write_result  # noqa: E402

from fedfrozen_app.__main__ import run as command  # noqa: E402
from fedfrozen_app.files.rows import read_rows  # noqa: E402
from fedfrozen_app.server import paced_round  # noqa: E402

SHARE, ROWS, COLUMNS = 0.05, 3, 8
PACINGS = {
    "deadline, all asked": ("pacing=deadline", "pacing.share=0.8"),
    "buffered, a tenth at work": (
        "pacing=buffered",
        "pacing.concurrency={tenth}",
        "pacing.buffer={hundredth}",
    ),
    "buffered, all at work": ("pacing=buffered", "pacing.concurrency={clients}", "pacing.buffer={tenth}"),
}


def write_table(path: Path, rows: int) -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal((rows, COLUMNS))
    labels = (values.sum(1) > 0).astype(int)
    lines = [",".join([*(f"x{n}" for n in range(COLUMNS)), "y"])]
    lines += [",".join([*(f"{v:.4f}" for v in row), str(y)]) for row, y in zip(values, labels, strict=True)]
    path.write_text("\n".join(lines) + "\n")


class Timed:
    """Seconds of each round before it trains."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        real = paced_round.PacedRound._draw

        def draw(one: Any, nodes: Any) -> list[str]:
            began = time.perf_counter()
            found = real(one, nodes)
            self.seconds.append(time.perf_counter() - began)
            return found

        paced_round.PacedRound._draw = draw  # type: ignore[method-assign]


def share_of_rounds(words: list[str], folder: Path, timed: Timed) -> dict[str, Any]:
    timed.seconds.clear()
    if command([*words, f"output_dir={folder}"]):
        raise SystemExit("The run failed.")
    rows = [row for row in read_rows(folder) if row["round"] > 0]
    seconds = [row["seconds"]["total"] for row in rows]
    return {
        "overrides": [word for word in words if not word.startswith("dataset.path=")],  # drawn for each run
        "seconds_of_rounds": seconds,
        "seconds_of_queue": list(timed.seconds),
        "share": ratio(timed.seconds, seconds).values,
        "asked": [len(row["virtual_by_client"]) for row in rows],
        "staleness_max": max(row["staleness_max"] for row in rows),
    }


def main() -> None:
    parser = arguments(__doc__ or "", repeats=1)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    folder, timed, found = Path(tempfile.mkdtemp(prefix="queue-")), Timed(), {}
    try:
        table = folder / "rows.csv"
        write_table(table, int(given.clients * ROWS / 0.8) + 1)  # a fifth is the test set
        usual = [
            *("strategy=fedavg", "dataset=table", f"dataset.path={table}", "dataset.label_column=y"),
            *("model=linear", "partition=iid", f"num_clients={given.clients}", f"num_rounds={given.rounds}"),
            *("clock=profiles", "clock.spread=1", f"eval_every={given.rounds}", "checkpoint.every=0"),
            *("track.tensorboard=false", "baseline=false", "runtime.max_block=100"),
        ]
        sizes = {"clients": given.clients, "tenth": given.clients // 10, "hundredth": given.clients // 100}
        for place, (name, words) in enumerate(PACINGS.items()):
            own = [word.format(**sizes) for word in words]
            found[name] = share_of_rounds([*usual, *own, *given.overrides], folder / str(place), timed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # Without the first round: there the model is built and nobody is at work.
    shares = {name: spread(one["share"][1:]) for name, one in found.items()}
    checks = {f"{name}: under {SHARE:.0%} of a round": one.median < SHARE for name, one in shares.items()}
    path = write_result("event_queue", {"clients": given.clients, "pacings": found})
    rows = [
        [
            *(name, f"{spread(one['asked'][1:]).median:.0f}", f"{spread(one['seconds_of_rounds'][1:]):.2f}"),
            *(f"{spread(one['seconds_of_queue'][1:]):.4f}", f"{shares[name]:.2%}"),
        ]
        for name, one in found.items()
    ]
    heads = ["pacing", "clients asked a round", "seconds of a round", "seconds of the queue", "share"]
    show("The event queue", heads, rows, checks, path)


if __name__ == "__main__":
    main()
