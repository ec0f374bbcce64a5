"""Sweeps through the command: what is complete is kept, what was begun goes on, what fails is told."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.config import compose_config, resolved
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import status
from fedfrozen_app.files.status import SweepFailed
from fedfrozen_app.report import output
from fedfrozen_app.run import evaluation
from fedfrozen_app.run import federate as running
from fedfrozen_app.server.hooks import ShowProgress
from fedfrozen_app.sweep.member import claim, objective
from fedfrozen_app.sweep.multirun import conclude, sweep_folder, sweep_name
from fedfrozen_app.sweep.sweep_table import members, state_of
from tests.conftest import SMALL, Run, same_bits, slowly

TINY = [*SMALL, "num_rounds=2", "strategy=fedavg"]


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Runs without pictures, in a folder of their own."""
    monkeypatch.setattr(output, "write_curves", lambda *args, **kwargs: None)
    monkeypatch.setattr(evaluation, "draw_labels", lambda *args: None)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def states(folder):
    return {one.folder.name: state_of(one.status) for one in members(folder)}


def written(folder):
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/model.safetensors")}


# Names ------------------------------------------------------------------------------------------------------


def name(*words):
    return sweep_name(OverridesParser.create().parse_overrides(list(words)))


def test_the_same_sweep_has_the_same_name_and_another_has_not():
    usual = name("strategy=fedavg,fedprox", "seed=0,1", "num_rounds=3", "num_clients=4")
    assert usual.startswith("strategy+seed-")
    assert usual == name("strategy=fedavg,fedprox", "seed=0,1", "num_clients=4", "num_rounds=3")
    assert usual == name("strategy=fedavg,fedprox", "seed=0,1,2,3", "num_rounds=3", "num_clients=4")
    assert usual == name(
        "strategy=fedavg,fedprox", "seed=0,1", "num_rounds=3", "num_clients=4", "hydra/launcher=joblib"
    )
    assert usual != name("strategy=fedavg,fedprox", "seed=0,1", "num_rounds=4", "num_clients=4")


def test_a_sweep_has_one_folder(tmp_path):
    assert sweep_folder(["seed=0,1", f"output_dir={tmp_path}"]) == (tmp_path, ["seed=0,1"])
    assert sweep_folder(["seed=0,1", f"hydra.sweep.dir='{tmp_path}/a,b'"])[0] == tmp_path / "a,b"
    for nowhere in ("null", ""):  # as for one run: the usual place
        assert sweep_folder(["seed=0,1", f"output_dir={nowhere}"]) == sweep_folder(["seed=0,1"])
    for words in (["output_dir=a", "hydra.sweep.dir=b"], ["output_dir=a,b"]):
        with pytest.raises(UserError, match="one folder"):
            sweep_folder(words)


def test_a_folder_of_another_configuration_is_not_taken(tmp_path):
    def begin(digest):
        own = status.Status(digest, [])
        return claim(tmp_path / "0", own).name

    assert [begin("a"), begin("b"), begin("c"), begin("b"), begin("a")] == ["0", "1", "2", "1", "0"]
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "metrics.jsonl").touch()  # a run of before there were status files
    assert begin("d") == "4"


# Status -----------------------------------------------------------------------------------------------------


def test_a_status_file_tells_how_a_run_ended(tmp_path):
    with status.recorded(tmp_path, {"seed": 1}, ["seed=1"]):
        assert status.read(tmp_path).state == "running" and status.read(tmp_path).alive
    done = status.read(tmp_path)
    assert (done.state, done.overrides) == ("complete", ["seed=1"])
    assert done.digest == status.digest_of({"seed": 1, "output_dir": "elsewhere", "track": {"wandb": True}})
    assert done.digest != status.digest_of({"seed": 2})
    for error, state, reason in (
        (UserError("No such data."), "failed", "No such data."),
        (RuntimeError("out of\n memory"), "failed", "RuntimeError: out of memory"),
        (KeyboardInterrupt(), "interrupted", ""),
    ):
        with pytest.raises(type(error)), status.recorded(tmp_path, {}, []):
            raise error
        told = status.read(tmp_path)
        assert (told.state, told.reason) == (state, reason)
        assert told.bad_input == isinstance(error, UserError)


def test_a_killed_process_is_not_running(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    mine = status.new_status({}, [])
    assert mine.alive
    dead = status.Status("", [], host=mine.host, pid=child.pid)
    assert not dead.alive and state_of(dead).startswith("died")
    # After a crash and a reboot its number may be some other process's.
    assert not replace(mine, boot="another").alive
    assert status.read(tmp_path) is None
    (tmp_path / status.FILE).write_text("{")
    assert status.read(tmp_path) is None


# Whole sweeps -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_again_with_more_seeds_keeps_what_is_there(quick, capsys):
    assert command(["-m", *TINY, "seed=0,2", "output_dir=sweep"]) == 0
    sweep = quick / "sweep"
    before = written(sweep)
    assert states(sweep) == {"0": "complete", "1": "complete"}
    assert (sweep / "comparison.md").is_file()
    capsys.readouterr()
    # Seed 1 takes the number that was seed 2's: it must go elsewhere.
    assert command(["-m", *TINY, "seed=0,1,2", "output_dir=sweep"]) == 0
    assert states(sweep) == {"0": "kept", "1": "kept", "2": "complete"}
    assert {name: written(sweep)[name] for name in before} == before
    assert [Run(sweep / str(n)).summary["seed"] for n in range(3)] == [0, 2, 1]
    assert "kept" in capsys.readouterr().out
    # A sweep of fewer seeds speaks of those alone, and nothing is trained.
    assert command(["-m", *TINY, "seed=1", "output_dir=sweep"]) == 0
    assert written(sweep) == {**before, "2": written(sweep)["2"]}
    out = capsys.readouterr().out
    assert "seed=2" not in out


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_by_the_same_command(quick, monkeypatch, capsys):
    words = ["-m", *TINY, "num_rounds=3", "seed=0,1"]
    after, rounds = ShowProgress.after_round, []

    def interrupt(self, strategy, row):
        rounds.append(row["round"])
        if len(rounds) == 4 + 3:  # seed 1, in its second round
            raise KeyboardInterrupt
        return after(self, strategy, row)

    monkeypatch.setattr(ShowProgress, "after_round", interrupt)
    assert command(words) == 130
    assert "Interrupted with 1 run complete: the same command continues." in capsys.readouterr().err
    (sweep,) = (quick / "outputs" / "sweeps").iterdir()
    assert states(sweep) == {"0": "complete", "1": "interrupted"}
    before = written(sweep)["0"]
    rounds.clear()
    assert command(words) == 0
    assert states(sweep) == {"0": "kept", "1": "complete"}
    assert rounds == [3] and written(sweep)["0"] == before
    monkeypatch.setattr(ShowProgress, "after_round", after)
    assert command([*words[1:-1], "seed=1", "output_dir=unbroken"]) == 0
    assert same_bits(Run(sweep / "1").model, Run(quick / "unbroken").model)


@pytest.mark.parametrize("digits", ["12e4567890123456", *slowly("1234567890123456", "0012345678901234")])
def test_a_sweep_finds_its_runs_whatever_its_token_looks_like(quick, monkeypatch, digits):
    """Hydra reads numbers where it can: such a token came back as another, and failures were not seen."""
    monkeypatch.setattr("os.urandom", lambda count: bytes.fromhex(digits))
    assert command(["-m", *TINY, "num_clients=500", "output_dir=sweep"]) == 2


def test_a_sweep_without_a_trace_of_its_runs_has_failed(tmp_path):
    with pytest.raises(SweepFailed, match="No run of this sweep is on record"):
        conclude(tmp_path, "t0")


@pytest.mark.slow
def test_a_failure_is_told_and_takes_no_other_with_it(quick, capsys):
    words = ["-m", *TINY, "num_clients=500,3", "output_dir=sweep"]
    assert command(words) == 2
    told = capsys.readouterr()
    assert "1 of 2 runs failed" in told.err and "500 clients" in told.err
    assert "500 clients" in told.out
    for page in ("comparison.md", "comparison.html"):  # which outlast the terminal
        assert "500 clients" in (quick / "sweep" / page).read_text()
    assert command(["report", "sweep"]) == 0
    assert ">num_clients=500</td>" in (quick / "sweep" / "comparison.html").read_text()
    assert Run(quick / "sweep" / "1").summary["status"] == "completed"
    assert status.read(quick / "sweep" / "0").bad_input
    assert command(words) == 2 and states(quick / "sweep")["1"] == "kept"
    # Without the bad value the sweep is sound: an old failure does not count against it.
    assert command(["-m", *TINY, "num_clients=3", "output_dir=sweep"]) == 0


@pytest.mark.slow
def test_an_unforeseen_error_spares_the_others(quick, monkeypatch, capsys):
    original = running.Progress

    def explode(total, **keys):
        if explode.calls == 0:
            explode.calls += 1
            raise MemoryError("no memory left")
        return original(total, **keys)

    explode.calls = 0
    monkeypatch.setattr(running, "Progress", explode)
    with pytest.raises(MemoryError):
        command(["-m", *TINY, "seed=0,1", "output_dir=sweep"])
    assert states(quick / "sweep") == {"0": "failed: MemoryError: no memory left", "1": "complete"}
    assert "no memory left" in capsys.readouterr().out


def test_a_value_that_cannot_be_composed_ends_at_once(quick, capsys):
    assert command(["-m", *TINY, "model=vit_tiny,nope"]) == 2
    assert "Unknown model 'nope'" in capsys.readouterr().err
    assert not list(quick.glob("outputs/sweeps/*/0"))


def test_single_runs_have_a_status_too(quick):
    assert command([*TINY, "output_dir=run"]) == 0
    told = status.read(quick / "run")
    assert told.state == "complete" and told.sweep == ""
    assert told.digest == status.digest_of(resolved(compose_config(TINY)))


def test_the_objective_is_validation_never_test(quick):
    rows = [
        {"round": 0, "val_accuracy": 0.99, "test_accuracy": 0.1},
        {"round": 1, "val_accuracy": 0.4, "test_accuracy": 0.9, "client_val_after": 0.7},
        {"round": 2, "val_accuracy": 0.3, "test_accuracy": 0.95, "client_val_after": 0.8},
    ]

    def of(*left_out):
        kept = [{key: row[key] for key in row if key not in left_out} for row in rows]
        (quick / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        return objective(quick)

    assert of() == 0.4
    assert of("val_accuracy") == 0.8
    assert of("val_accuracy", "client_val_after") is None


# Search -----------------------------------------------------------------------------------------------------


def test_a_search_goes_on_where_it_stopped(quick, capsys):
    pytest.importorskip("optuna")
    words = [*TINY, "client.lr=tag(log,interval(1e-4,1e-1))", "client.batch_size=8,16", "output_dir=found"]
    assert command(["search", "--trials", "2", *words]) == 0
    before = written(quick / "found")
    assert command(["search", "--trials", "3", *words]) == 0
    assert states(quick / "found") == {"0": "kept", "1": "kept", "2": "complete"}
    assert {name: written(quick / "found")[name] for name in before} == before
    best = json.loads((quick / "found" / "best.json").read_text())
    assert best["best_val_accuracy"] == max(objective(quick / "found" / str(n)) for n in range(3))
    rates = [Run(quick / "found" / str(n)).summary["config"]["client"]["lr"] for n in range(3)]
    assert len(set(rates)) == 3 and all(1e-4 <= rate <= 1e-1 for rate in rates)


def test_bad_searches(quick, capsys):
    pytest.importorskip("optuna")
    for words, told in (
        (["num_rounds=2"], "nothing to search"),
        (["client.lr=interval(1,2)", "num_round=2"], "did you mean num_rounds?"),
        (["client.lr=interval(1,2)", "--trails", "3"], "takes no --trails"),
        (["client.lr=interval(1,2)", "--jobs", "0"], "at least 1"),
        (["client.lr=interval(2,1)"], "give a lower end first"),
        (["client.lr=tag(log,interval(0,1))"], "above 0 for a log scale"),
    ):
        assert command(["search", *words]) == 2
        assert told in capsys.readouterr().err


# In other processes -----------------------------------------------------------------------------------------


def fedfrozen(*words):
    return [sys.executable, "-m", "fedfrozen_app", *words]


@pytest.mark.slow
def test_a_killed_sweep_repeats_no_finished_run(tmp_path):
    words = fedfrozen("-m", *SMALL, "strategy=fedavg,fedprox,fedfrozen", "seed=0,1", f"output_dir={tmp_path}")
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen = 0
    for line in child.stdout:
        seen += " round 1/" in line  # behind "run 3/6"
        if seen == 4:
            child.send_signal(signal.SIGKILL)
            break
    child.communicate(timeout=60)
    before = written(tmp_path)
    assert len(before) == 3 and state_of(status.read(tmp_path / "3")).startswith("died")
    again = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert list(states(tmp_path).values()) == ["kept"] * 3 + ["complete"] * 3
    assert {name: written(tmp_path)[name] for name in before} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "package"),
    [("joblib", "hydra_plugins.hydra_joblib_launcher"), ("submitit_local", "submitit")],
)
def test_launchers_that_use_other_processes(launcher, package, tmp_path):
    pytest.importorskip(package)
    words = ["-m", *TINY, "num_clients=3,500", "seed=0,1", f"hydra/launcher={launcher}"]
    done = subprocess.run(
        fedfrozen(*words, f"output_dir={tmp_path}"), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 2, done.stderr
    assert "2 of 4 runs failed" in done.stderr and "500 clients" in done.stderr
    assert sorted(state.partition(":")[0] for state in states(tmp_path).values()) == [
        *("complete", "complete", "failed", "failed")
    ]


@pytest.mark.slow
def test_two_equal_sweeps_at_once_share_the_work_and_both_see_all_of_it(tmp_path):
    words = fedfrozen("-m", *SMALL, "strategy=fedavg,fedfrozen", "seed=0,1", f"output_dir={tmp_path}/sweep")
    both = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)
    ]
    told = [process.communicate(timeout=280)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert sum(text.count("round 1/3") for text in told) == 4  # each run trained once, by one of them
    assert all(text.count("round 1/3") > 0 for text in told)
    runs = (tmp_path / "sweep" / "comparison_runs.csv").read_text().strip().splitlines()
    assert len(runs) == 1 + 4
    for text in told:
        table = text.split("Sweep ")[-1]
        assert table.count("complete") + table.count("kept") >= 4, text
    assert not list((tmp_path / "sweep" / ".sweeps").iterdir())


@pytest.mark.slow
def test_a_sweep_takes_over_what_an_equal_one_leaves_behind(tmp_path):
    words = fedfrozen("-m", *SMALL, "num_rounds=12", "seed=0,1", f"output_dir={tmp_path}/sweep")
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = tmp_path / "sweep" / "0" / "metrics.jsonl"
    while not rows.exists() or len(rows.read_text().splitlines()) < 2:
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGSTOP)  # it is there, and gets nowhere
    second = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in second.stdout:
        lines.append(line)
        if "Waiting for process" in line:
            assert str(first.pid) in line and "runs 0" in line
            first.kill()
            break
    told = "".join(lines) + second.communicate(timeout=280)[0]
    assert second.returncode == 0 and "Waiting for process" in told, told
    assert list(states(tmp_path / "sweep").values()) == ["complete"] * 2


# Side by side -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_seeds_train_side_by_side_and_leave_what_they_leave_alone(quick, caplog):
    words = ["-m", *TINY, "runtime.runner=cohort", "strategy=fedavg,fedfrozen", "seed=0,1"]
    alone, beside = quick / "alone", quick / "beside"
    assert command([*words, f"output_dir={alone}", "runtime.stack_runs=off"]) == 0
    assert "side by side" not in caplog.text
    assert command([*words, f"output_dir={beside}", "runtime.stack_runs=3"]) == 0
    assert "up to 3 side by side" in caplog.text
    assert states(beside) == states(alone) == dict.fromkeys("0123", "complete")
    for number in "0123":
        one, other = Run(alone / number), Run(beside / number)
        for key, value in one.model.items():  # in float32
            torch.testing.assert_close(other.model[key], value, rtol=1e-3, atol=1e-4)
        assert [row.get("bytes_up") for row in one.rows] == [row.get("bytes_up") for row in other.rows]
        assert one.summary["config"]["seed"] == other.summary["config"]["seed"]
    before = written(beside)
    assert command([*words[:-1], "seed=0,1,2", f"output_dir={beside}", "runtime.stack_runs=3"]) == 0
    after = written(beside)
    assert {key: after[key] for key in before} == before and len(after) == 6  # kept, and two more


@pytest.mark.slow
def test_one_that_fails_side_by_side_is_told_and_the_others_are_complete(quick):
    words = ["-m", *TINY, "runtime.runner=cohort", "client=sgd", "client.lr=0.01,1e38", "seed=0,1"]
    assert command([*words, f"output_dir={quick / 'sweep'}", "runtime.stack_runs=4"]) == 1
    found = states(quick / "sweep")
    assert [found[number] == "complete" for number in "0123"] == [True, True, False, False]
    assert "No client gave a sound reply" in found["2"]


def test_runs_side_by_side_are_a_number_auto_or_off(capsys):
    for word in ("some", "0", "-2", "1.5"):
        assert command([f"runtime.stack_runs={word}"]) == 2
        assert "auto or off" in capsys.readouterr().err
