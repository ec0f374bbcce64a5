"""Record all golden cases anew: `python tests/golden/record.py`, or some of them by name.

Only where results are meant to change: what is recorded here is what every later tree must reproduce. Run it
on the machine whose bits are to be kept, and say in the commit why they changed.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this tree, wherever an installed one may lie

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from tests.golden.cases import CASES, Case  # noqa: E402
from tests.golden.replay import (  # noqa: E402
    ARRAYS,
    RECORDED,
    RESULTS,
    RUN,
    STOPPED,
    Player,
    arrays_of,
    command,
    digest,
    figures_of,
    fingerprint,
)

# What goes on from a stopped run needs; pictures and pages are made anew.
KEPT = ("metrics.jsonl", "summary.json", "status.json", "best.safetensors", "model.safetensors", "privacy")


def main(names: list[str]) -> None:
    if not names:
        shutil.rmtree(RECORDED, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch, Player() as player:
        os.environ["FLWR_HOME"] = f"{scratch}/home"
        for case in CASES:
            if names and case.name not in names:
                continue
            with _fresh_directory():
                folder = player.play_case(case)
                keep(case, figures_of(folder), arrays_of(folder))
            if case.stop is not None:
                with _fresh_directory():
                    stop_in_the_middle(case)


def keep(case: Case, figures: dict[str, Any], arrays: dict[str, Tensor]) -> None:
    """Put a case to those recorded before, in the order of the list; a line for each."""
    book, store = {"fingerprint": fingerprint(), "cases": {}}, {}
    if RESULTS.exists():
        book, store = json.loads(RESULTS.read_text()), load_file(ARRAYS)
        assert book["fingerprint"] == fingerprint(), "the others were recorded elsewhere: record all"
    digests = {name: digest(value) for name, value in arrays.items()}
    known = book["cases"] | {case.name: {**figures, "arrays": digests}}
    lines = [f'"{one.name}": {json.dumps(known[one.name])}' for one in CASES if one.name in known]
    RECORDED.mkdir(exist_ok=True)
    head = f'{{"fingerprint": {json.dumps(book["fingerprint"])}, "cases": {{\n'
    RESULTS.write_text(head + ",\n".join(lines) + "\n}}\n")
    # By digest: what is equal in several cases, such as frozen embeddings, is kept once.
    store |= {digests[name]: value for name, value in arrays.items()}
    used = {key for one in CASES if one.name in known for key in known[one.name]["arrays"].values()}
    save_file({key: store[key] for key in sorted(used)}, ARRAYS)


def stop_in_the_middle(case: Case) -> None:
    """Ctrl-C at the line of round `case.stop`, when its checkpoint is on the disk; keep the folder."""

    class Stop:
        """In place of stdout."""

        def write(self, text: str) -> int:
            if text.startswith(f"round {case.stop}/"):
                raise KeyboardInterrupt
            return sys.__stdout__.write(text)

        def flush(self) -> None:
            sys.__stdout__.flush()

        def isatty(self) -> bool:
            return False

    with contextlib.redirect_stdout(Stop()):  # type: ignore[type-var]
        assert command([*case.words, f"output_dir={RUN}"]) == 130
    target = STOPPED / case.name
    shutil.rmtree(target, ignore_errors=True)
    checkpoint = f"checkpoints/{case.stop}"
    shutil.copytree(Path(RUN, checkpoint), target / checkpoint)
    for name in KEPT:
        source = Path(RUN, name)
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("*.lock"))
        elif source.exists():
            shutil.copyfile(source, target / name)
    # Whose process it was is nobody's business, and on another machine it could be somebody else's.
    status = json.loads((target / "status.json").read_text())
    status.pop("sha256", None)  # the record as it would be without a seal
    (target / "status.json").write_text(json.dumps(status | {"host": "", "pid": 0}))


@contextlib.contextmanager
def _fresh_directory():
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        yield


if __name__ == "__main__":
    main(sys.argv[1:])
