"""What modules are called, and that verbs which only look at runs start without what training needs."""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.conftest import SMALL, slowly

HEAVY = {"torch", "transformers", "datasets", "flwr", "ray", "matplotlib"}
LIGHT = ("show", "report", *slowly("list", "compare", "watch"))
ROOT = Path(__file__).parents[2]
EACH_ROOM_HAS_ONE = {"__init__.py", "command.py"}  # a package, and the verb of a whole capability


@pytest.mark.parametrize("verb", LIGHT)
def test_a_look_imports_nothing_that_trains(verb):
    code = f"""
import importlib, sys
from fedfrozen_app.__main__ import run
from fedfrozen_app.commands import VERBS
importlib.import_module(VERBS[{verb!r}].partition(":")[0])
print(*({HEAVY!r} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_run_reaches_its_first_round_without_what_it_does_not_use(tmp_path):
    """DP-SGD's Opacus, the hub's data sets, pictures, other runtimes, and whole capabilities of their own."""
    rooms = [f"fedfrozen_app.{room}" for room in ("audit", "theory", "align", "sites", "runtimes.flower")]
    others = [
        "opacus",
        "scipy.stats",
        "datasets",
        "pandas",
        "pyarrow",
        "matplotlib",
        "seaborn",
        "peft",
        "ray",
    ]
    code = f"""
import sys
from fedfrozen_app.__main__ import run
from fedfrozen_app.server import train_round

def stop(self):
    print("imported:", *({set(rooms + others)!r} & set(sys.modules)))
    raise SystemExit

train_round.TrainRound.run = stop
run({[*SMALL, f"output_dir={tmp_path / 'run'}"]!r})"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if line.startswith("imported")] == ["imported:"], (
        done.stdout + done.stderr
    )


def test_no_two_files_of_one_name_for_two_things():
    places = defaultdict(list)
    for package in ("fedfrozen_app", "strategies", "clients"):
        for path in (ROOT / package).rglob("*.py"):
            places[path.name].append(str(path.relative_to(ROOT)))
    shared = {name: sorted(found) for name, found in places.items() if len(found) > 1}
    # A method's two sides go by the method's name.
    pairs = {name for name, found in shared.items() if found == [f"clients/{name}", f"strategies/{name}"]}
    assert pairs
    assert {name: found for name, found in shared.items() if name not in EACH_ROOM_HAS_ONE | pairs} == {}


def test_a_package_that_hides_ours_gives_a_sentence(tmp_path):
    """`python -m` puts the folder in which one stands before everything else."""
    (tmp_path / "strategies").mkdir()
    (tmp_path / "strategies/__init__.py").touch()
    command = [sys.executable, "-m", "fedfrozen_app", "strategy=fedprox"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"fedfrozen: Another package called 'strategies' ({tmp_path}/strategies) hides"
    )
