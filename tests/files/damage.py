"""Damaged files of a run and of a sweep, and what every verb does about them.

`python -m tests.files.damage [run] [sweep] [audited] [text] [scaffold] --out FILE` writes a line for each
file, fault and verb, and prints the table of all outcomes. Given again with the same file it continues.
"""

import argparse
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fedfrozen
from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands import repair
from fedfrozen_app.commands.watch import LivePages
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import status
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.report import output
from tests.cached_composition import remembered
from tests.conftest import SMALL

NOBODY = 65534
WRONG = ("TRACEBACK", "SILENT")
TINY = [*SMALL, "num_rounds=2", "track.tensorboard=false"]
RUN_FILES = (
    *("model.safetensors", "best.safetensors", "summary.json", "fairness.json", "personal.json"),
    *("metrics.jsonl", "status.json", "manifest.jsonl", "clients.json", "data.json", "labels.png"),
    *("curves.png", "report.html", "checkpoints/2/state.json", "checkpoints/2/model.safetensors"),
    *("baselines.json", ".hydra/config.yaml"),
)
SWEEP_FILES = (
    *("manifest.jsonl", "comparison.csv", "comparison.html", "comparison_runs.csv", "multirun.yaml"),
    *("0/status.json", "0/summary.json", "0/metrics.jsonl", "0/manifest.jsonl", "0/model.safetensors"),
    *("0/data.json", "0/checkpoints/2/model.safetensors"),
)
AUDITED_FILES = (
    *("uploads/2/base.safetensors", "uploads/2/0.safetensors", "uploads/2/digests.json", "privacy/0.json"),
    *("privacy/audit/0/1.safetensors", "privacy/audit/0/canaries.safetensors", "metrics.jsonl"),
    *("privacy/0.jsonl", "privacy/0.safetensors"),
)
TEXT_FILES = ("tokenizer.json", "samples.json", "model.safetensors", "data.json")
SCAFFOLD_FILES = (
    *("checkpoints/2/clients.safetensors", "checkpoints/2/strategy.safetensors"),
    *("checkpoints/2/state.json", "checkpoints/2/model.safetensors"),
)
AUDITED = (
    *("strategy=fedavg", "privacy=dp_sgd", "privacy.audited='0'", "privacy.canaries=20"),
    "privacy.epsilon=8",
)
TEXT = (
    *(
        "dataset=instructions",
        "dataset.path={}/sums.jsonl",
        "dataset.max_tokens=24",
        "dataset.vocab_size=300",
    ),
    *("model.config.num_key_value_heads=1", "dataset.tokenizer=learned"),
)
MORE = {
    "run": ("personal=true",),
    "audited": AUDITED,
    "text": TEXT,
    "scaffold": ("strategy=scaffold",),
}
# Written while a run goes on, or different each time.
NOT_COMPARED = (
    "multirun.yaml",
    "status.json",
    "lease.json",
    "manifest.jsonl",
    "tensorboard",
    ".hydra",
    ".png",
    ".damaged",
)


def flip_bit(path: Path) -> None:
    """One bit in the middle; size and time stay. Of arrays, a bit that changes a weight a little."""
    state, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def foreign_bytes(path: Path) -> None:
    """No UTF-8, no JSON, no arrays."""
    path.write_bytes(b"\xff\xfe\x80 not what a run writes \x00\xc3\x28" * 40)


def foreign_json(path: Path) -> None:
    """JSON that is deeper than a parser goes."""
    path.write_text("[" * 100_000 + "]" * 100_000)


def foreign_owner(path: Path) -> None:
    path.chmod(0)
    if os.getuid() == 0:
        os.chown(path, 0, 0)


FAULTS: dict[str, Callable[[Path], None]] = {
    "bit flip": flip_bit,
    "truncated": truncate,
    "empty": empty,
    "missing": Path.unlink,
    "foreign bytes": foreign_bytes,
    "deep JSON": foreign_json,
    "foreign owner": foreign_owner,
}


def watch_page(folder: str) -> int:
    """What `fedfrozen watch` serves, without its server."""
    pages = LivePages(Path(folder))
    print(pages.page("/", "") or "")
    return 0


def python_run(folder: str) -> int:
    """What a notebook reads of a run."""
    run = fedfrozen.load(folder)
    print(run, run.summary["final_test_accuracy"], run.metrics.to_csv(), run.clients.to_csv())
    print({name: float(value.sum()) for name, value in run.model().state_dict().items()})
    return 0


def python_sweep(folder: str) -> int:
    sweep = fedfrozen.load(folder)
    found = sweep.compare()
    print(len(sweep.runs), found.table.to_csv(), found.runs.to_csv(), *found.notes)
    return 0


def resume_after_first(run: Path) -> int:
    """As if the second round had been interrupted."""
    shutil.rmtree(run / "checkpoints" / "2")
    known = status.read(run)
    assert known is not None
    status.write(run, status.replace(known, state="interrupted"))
    return command(["resume", str(run)])


RUN_VERBS: dict[str, Callable[[Path], int]] = {
    "evaluate": lambda run: command(["evaluate", str(run)]),
    "export": lambda run: command(["export", str(run), str(run.parent / "exported")]),
    "fairness": lambda run: command(["fairness", str(run)]),
    "personal": lambda run: command(["personal", str(run), f"png={run.parent}/personal.png"]),
    "show": lambda run: command(["show", str(run)]),
    "list": lambda run: command(["list", str(run.parent)]),
    "report": lambda run: command(["report", str(run)]),
    "compare": lambda run: command(["compare", str(run), "--out", str(run.parent / "compared")]),
    "watch": lambda run: watch_page(str(run)),
    "attach": lambda run: command(["attach", str(run)]),
    "resume": lambda run: command(["resume", str(run)]),
    "python": lambda run: python_run(str(run)),
    "from": lambda run: command(
        [*TINY, "num_rounds=3", f"from={run}/checkpoints/2", f"output_dir={run.parent}/fork"]
    ),
    "verify": lambda run: command(["verify", str(run)]),
    "repair": lambda run: command(["verify", str(run), "--repair"]),
    "extend": lambda run: command(["resume", str(run), "num_rounds=3"]),
    "baselines": lambda run: command(["baselines", str(run), "--plain"]),
    "audit": lambda run: command(["audit", str(run), "rows=10", "shadow_pairs=1", "shadow_epochs=1"]),
    "plan": lambda run: command(["plan", *TINY, f"from={run}/checkpoints/2"]),
}
SWEEP_VERBS: dict[str, Callable[[Path], int]] = {
    "list": lambda sweep: command(["list", str(sweep)]),
    "compare": lambda sweep: command(["compare", str(sweep), "--out", str(sweep.parent / "compared")]),
    "report": lambda sweep: command(["report", str(sweep)]),
    "watch": lambda sweep: watch_page(str(sweep)),
    "python": lambda sweep: python_sweep(str(sweep)),
    "sweep again": lambda sweep: command(["-m", *TINY, "strategy=fedavg", "seed=0,1", f"output_dir={sweep}"]),
    "verify": lambda sweep: command(["verify", str(sweep)]),
    "repair": lambda sweep: command(["verify", str(sweep), "--repair"]),
}


AUDITED_VERBS: dict[str, Callable[[Path], int]] = {
    "audit": lambda run: command(["audit", str(run), "rows=10", "shadow_pairs=1", "shadow_epochs=1"]),
    "report": RUN_VERBS["report"],
    "resume": lambda run: resume_after_first(run),
    "verify": RUN_VERBS["verify"],
    "repair": RUN_VERBS["repair"],
}
TEXT_VERBS = {
    name: RUN_VERBS[name] for name in ("evaluate", "export", "report", "extend", "verify", "repair")
}
SCAFFOLD_VERBS = {
    **{name: RUN_VERBS[name] for name in ("evaluate", "extend", "from", "verify", "repair")},
    "resume": lambda run: command(["resume", str(run), "num_rounds=3"]),
}
TABLES = {
    "run": (RUN_FILES, RUN_VERBS),
    "sweep": (SWEEP_FILES, SWEEP_VERBS),
    "audited": (AUDITED_FILES, AUDITED_VERBS),
    "text": (TEXT_FILES, TEXT_VERBS),
    "scaffold": (SCAFFOLD_FILES, SCAFFOLD_VERBS),
}


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    written: dict[str, str] = field(default_factory=dict)  # what was left in each file that it wrote

    @property
    def text(self) -> str:
        return self.out + self.err


def carry_out(verb: Callable[[Path], int], folder: Path) -> Outcome:
    """In this process. What no verb expected ends up in the text as its traceback."""
    out, err = io.StringIO(), io.StringIO()
    os.environ["COLUMNS"] = "250"  # no word of a table is broken
    with redirect_stdout(out), redirect_stderr(err), logged(err):
        try:
            code = verb(folder)
        except UserError as error:  # of the page, whose server answers with it
            print(error)
            code = 2
        except Exception:  # noqa: BLE001  (which is what is looked for)
            traceback.print_exc()
            code = 1
    return Outcome(code, out.getvalue(), err.getvalue())


@contextmanager
def logged(stream: io.StringIO) -> Iterator[None]:
    import logging

    handler = logging.StreamHandler(stream)
    logging.getLogger("fedfrozen_app").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("fedfrozen_app").removeHandler(handler)


class Bench:
    """A trained run, a sweep, an audited run, and a place where copies of them are damaged."""

    def __init__(self, place: Path) -> None:
        self.kept, self.work = place / "kept", place / "work"
        self.kept.mkdir()
        self.clean: dict[tuple[str, str], Outcome] = {}
        for module in (output, repair):  # pictures take longer than everything else
            module.write_curves = lambda rows, path, title: replace_file(path, "curves")

    def _train(self, name: str) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        (self.kept / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sums()))
        more = [word.format(self.kept) for word in MORE.get(name, ())]
        words = [*TINY, *more, f"output_dir={self.work}/{name}"]
        training = SWEEP_VERBS["sweep again"] if name == "sweep" else lambda _: command(words)
        done = carry_out(training, self.work / name)
        assert done.code == 0, done.text
        if name == "run":
            assert RUN_VERBS["baselines"](self.work / name) == 0
        (self.work / name).rename(self.kept / name)

    def fresh(self, name: str) -> Path:
        """A whole copy, always in the same place: paths are part of what verbs print."""
        if not (self.kept / name).exists():
            self._train(name)
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        shutil.copytree(self.kept / name, self.work / name)
        return self.work / name

    def outcome(self, name: str, file: str, fault: str, verb: str) -> tuple[Outcome, Outcome]:
        """Of the verb on a damaged copy, and on a whole one."""
        verbs = TABLES[name][1]
        if (name, verb) not in self.clean:
            self.clean[name, verb] = self.watched(verbs[verb], self.fresh(name))
        folder = self.fresh(name)
        if fault == "foreign owner":
            with as_nobody(self.work):
                FAULTS[fault](folder / file) if os.getuid() else None
                hide(folder / file)
                return self.watched(verbs[verb], folder), self.clean[name, verb]
        FAULTS[fault](folder / file)
        return self.watched(verbs[verb], folder), self.clean[name, verb]

    def watched(self, verb: Callable[[Path], int], folder: Path) -> Outcome:
        """The verb's outcome, with what it wrote."""
        before = stamps(self.work)
        with even_clock():
            done = carry_out(verb, folder)
        new = (path for path, stamp in stamps(self.work).items() if before.get(path) != stamp)
        written = {str(path.relative_to(self.work)): content_of(path) for path in new if is_compared(path)}
        return replace(done, written=written)


@contextmanager
def even_clock() -> Iterator[None]:
    """Each look at the stopwatch is a millisecond after the one before, so that reports are the same."""
    plain, steps = time.perf_counter, itertools.count()
    time.perf_counter = lambda: next(steps) / 1000
    try:
        yield
    finally:
        time.perf_counter = plain


def sums() -> Iterator[dict[str, str]]:
    """Rows of a small language task."""
    for n in range(160):
        yield {"prompt": f"{n % 7}+{n % 5}?", "answer": "is " * (n % 4) + str(n % 7 + n % 5)}


def stamps(folder: Path) -> dict[Path, tuple[int, int, int]]:
    found = {}
    for path in folder.rglob("*"):
        state = path.lstat()
        if path.is_file() and not path.is_symlink():
            found[path] = (state.st_ino, state.st_mtime_ns, state.st_size)
    return found


def is_compared(path: Path) -> bool:
    return not any(word in str(path) for word in NOT_COMPARED)


def content_of(path: Path) -> str:
    """Text without its times; of arrays, their digest."""
    try:
        content = path.read_bytes()
    except PermissionError:
        return ""
    if path.suffix == ".safetensors":
        return hashlib.sha256(content).hexdigest()
    return without_times(content.decode("utf-8", errors="replace"))


def hide(path: Path) -> None:
    """From everybody but root, who may do this at any time."""
    before = os.geteuid()
    os.seteuid(os.getuid())
    foreign_owner(path)
    os.seteuid(before)


@contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """Root may read everything: inside the block this process is somebody else, who owns the folder."""
    if os.getuid():
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    before = tempfile.tempdir  # which may be root's alone
    os.seteuid(NOBODY)
    try:
        tempfile.tempdir = str(folder)
        yield
    finally:
        tempfile.tempdir = before
        os.seteuid(0)


@contextmanager
def bench() -> Iterator[Bench]:
    """Outside pytest's folders, which are root's alone."""
    place = Path(tempfile.mkdtemp(prefix="damage-"))
    place.chmod(0o755)
    try:
        yield Bench(place)
    finally:
        shutil.rmtree(place)


def names_file(outcome: Outcome, file: str) -> bool:
    parts = Path(file).parts
    folder = {"checkpoints": "checkpoint", "uploads": "uploads/2"}.get(parts[0], parts[-1])
    return parts[-1] in outcome.text or folder in outcome.text


def verdict(outcome: Outcome, clean: Outcome, file: str) -> str:
    """ "as ever": the file is not needed; "told": the damage is named; else what is wrong."""
    if "Traceback" in outcome.text:
        return "TRACEBACK"
    named = names_file(outcome, file) and not names_file(clean, file)
    same = outcome.code == clean.code and without_times(outcome.out) == without_times(clean.out)
    if same and outcome.written == clean.written and not named:
        return "as ever"
    if not names_file(outcome, file) and not is_said_in_what_was_written(outcome, clean, file):
        return "SILENT"
    if outcome.code == 0:
        return "told, done"
    return "told, refused" if outcome.code == 2 else "told, exit 1"


def is_said_in_what_was_written(outcome: Outcome, clean: Outcome, file: str) -> bool:
    name = Path(file).name
    return any(
        re.search(rf"{re.escape(name)}[^.]{{0,80}} (is damaged|is missing|cannot be read)", text) is not None
        and text != clean.written.get(path)
        for path, text in outcome.written.items()
    )


def without_times(text: str) -> str:
    return re.sub(r"\d+(\.\d+)? (s|ms|min)\b|\d+:\d\d|data-version=\S*", "", text)


def sentence(outcome: Outcome, file: str) -> str:
    """The first line that names the file, without the folder of the bench."""
    for line in outcome.text.splitlines():
        if Path(file).name in line or Path(file).parts[0] in line:
            return re.sub(r"/\S*/work/", "", line).strip()[:300]
    return ""


def record(place: Bench, names: list[str], out: Path) -> list[dict[str, Any]]:
    """A line for each cell; those that are in the file already are not repeated."""
    found = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(one["of"], one["file"], one["fault"], one["verb"]) for one in found}
    for name in names:
        files, verbs = TABLES[name]
        for cell in ((name, *rest) for rest in itertools.product(files, FAULTS, verbs)):
            if cell in known:
                continue
            outcome, clean = place.outcome(*cell)
            one = dict(zip(("of", "file", "fault", "verb"), cell, strict=True))
            one |= {"verdict": verdict(outcome, clean, cell[1]), "code": outcome.code}
            found.append(one | {"reads": sentence(outcome, cell[1])})
            with out.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
            if one["verdict"] in WRONG:
                print(json.dumps(found[-1]), flush=True)
    return found


def table(found: list[dict[str, Any]], name: str) -> str:
    """One line per file and fault, one column per verb."""
    cells = {(one["file"], one["fault"], one["verb"]): one["verdict"] for one in found if one["of"] == name}
    verbs = list(dict.fromkeys(verb for _, _, verb in cells))
    lines = [f"| {name}: file | fault | " + " | ".join(verbs) + " |", "|---" * (2 + len(verbs)) + "|"]
    for file, fault in dict.fromkeys((file, fault) for file, fault, _ in cells):
        row = [cells.get((file, fault, verb), "") for verb in verbs]
        lines.append(f"| {file} | {fault} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(TABLES))
    parser.add_argument("--out", type=Path, default=Path("damaged_files.jsonl"))
    given = parser.parse_args()
    with bench() as place, remembered(place.kept / "composed"):
        found = record(place, given.names, given.out)
    for name in given.names:
        print(f"\n{table(found, name)}")


if __name__ == "__main__":
    main()
