"""What the manifest of a run folder costs: its share of a round, and `fedfrozen list` over 500 runs.

    python benchmarks/run_folders.py [--runs 500] [KEY=VALUE...]

Trains the default run once, with these overrides. A round's share is the time spent on digests and lines of
`manifest.jsonl` from the row before to the row of that round, against the seconds of the round.
"""

import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common import arguments, ratio, show, spread, write_result  # noqa: E402

from fedfrozen_app.__main__ import run as command  # noqa: E402
from fedfrozen_app.files import folder_manifest  # noqa: E402
from fedfrozen_app.files.rows import read_rows  # noqa: E402

NOTES = ("note_file", "note_row", "note_rows", "note_gone", "note_end", "begin")
SHARE, SECONDS = 0.01, 2.0


class Timed:
    """Seconds and calls of the functions that write the manifest."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.rows: list[float] = []  # seconds of the manifest since the row before
        self._counted = 0.0
        for name in NOTES:
            setattr(folder_manifest, name, self._timed(getattr(folder_manifest, name)))

    def _timed(self, function: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*given, **more)
            finally:
                self.seconds.append(time.perf_counter() - began)
                if function.__name__ == "note_row":
                    self.rows.append(sum(self.seconds) - self._counted)
                    self._counted = sum(self.seconds)

        return call


def share_of_a_round(folder: Path, overrides: list[str]) -> dict[str, Any]:
    timed = Timed()
    if command(["output_dir=" + str(folder), "track.tensorboard=false", *overrides]):
        raise SystemExit("The run failed.")
    rounds = [row["seconds"]["total"] for row in read_rows(folder) if row["round"] > 0]
    of_rounds = timed.rows[-len(rounds) :]
    return {
        "overrides": overrides,
        "seconds_of_rounds": rounds,
        "seconds_of_manifest": of_rounds,
        "share_of_rounds": ratio(of_rounds, rounds).values,
        "lines": len(timed.seconds),
        "seconds_of_all_lines": sum(timed.seconds),  # of the files at the start and the end too
        "share_of_run": sum(timed.seconds) / sum(rounds),
    }


def copies(run: Path, place: Path, count: int) -> None:
    """Hard links: the files of a run as it left them."""
    for number in range(count):
        target = place / f"{number:03d}"
        shutil.copytree(run, target, copy_function=lambda source, to: Path(to).hardlink_to(source))


def list_seconds(place: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Of the whole command, Python's start included: from start to end, and of processor time."""
    wall, processor = [], []
    for _ in range(repeats):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        line = [sys.executable, "-m", "fedfrozen_app", "list", str(place)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
        wall.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert "damaged" not in done.stdout, done.stdout[:2000]
    return wall, processor


def main() -> None:
    parser = arguments(__doc__ or "", repeats=5)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="folders-"))
    try:
        cost = share_of_a_round(folder / "run", given.overrides)
        copies(folder / "run", folder / "many", given.runs)
        wall, processor = list_seconds(folder / "many", given.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    share = spread(cost["share_of_rounds"])
    checks = {
        f"the manifest takes less than {SHARE:.0%} of a round": share.median < SHARE,
        f"list over {given.runs} runs takes less than {SECONDS:g} s": spread(wall).median < SECONDS,
    }
    listing = {"runs": given.runs, "seconds": wall, "processor_seconds": processor}
    path = write_result("run_folders", {"manifest": cost, "list": listing})
    rows = [
        ["share of a round", f"{share:.3%}"],
        ["seconds of a round", f"{spread(cost['seconds_of_rounds']):.2f}"],
        [f"all {cost['lines']} lines and their digests", f"{cost['seconds_of_all_lines']:.3f} s"],
        ["of that to the seconds of all rounds", f"{cost['share_of_run']:.3%}"],
        [f"list over {given.runs} runs", f"{spread(wall):.2f} s"],
        ["of that processor time", f"{spread(processor):.2f} s"],
    ]
    show("Run folders", ["what", "found"], rows, checks, path)


if __name__ == "__main__":
    main()
