"""list, show, doctor and completion, on real runs and a real shell."""

import json
import shutil
import subprocess

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands import VERBS, doctor
from fedfrozen_app.commands.completion import script, words
from fedfrozen_app.files import status
from tests.conftest import SMALL


@pytest.fixture
def wide(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_are_listed_with_their_state(train, wide, capsys):
    run = train("strategy=fedavg", folder="day/a")
    dead = status.new_status({}, ["strategy=fedprox", "seed=3"])
    (wide / "day" / "b").mkdir()
    status.write(wide / "day" / "b", status.Status(**{**vars(dead), "pid": 2**22 + 1}))
    assert command(["list", "day"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (first,) = [line for line in lines if "fedavg" in line]
    assert f"{run.summary['final_test_accuracy']:.4f}" in first and "completed" in first
    (second,) = [line for line in lines if "fedprox" in line]
    assert "died" in second and " 3 " in second
    assert command(["list"]) == 2
    assert "There is no outputs/ here" in capsys.readouterr().err
    (wide / "empty").mkdir()
    assert command(["list", "empty"]) == 2


@pytest.mark.slow
def test_a_run_is_shown_with_what_was_changed(wide, train, capsys):
    run = train("strategy=fedprox", "strategy.mu=0.5")
    assert command(["show", str(run.folder)]) == 0
    out = capsys.readouterr().out
    assert "Final test accuracy" in out and "strategy.mu" in out and "num_rounds" in out
    assert "fedfrozen num_clients=3" in out  # the command
    assert "client.lr " not in out  # as by default
    for commit in ("0123abcd", None):  # a bundle, and an installed package, know of none
        (run.folder / "summary.json").write_text(json.dumps(run.summary | {"git_commit": commit}))
        assert command(["show", str(run.folder)]) == 0
        out = capsys.readouterr().out
        assert "0123abcd" in out if commit else "Commit" not in out
    (run.folder / "summary.json").unlink()
    assert command(["show", str(run.folder)]) == 2
    with status.recorded(run.folder, {}, [*SMALL]):
        assert command(["show", str(run.folder)]) == 0
    assert "3 rounds done" in capsys.readouterr().out
    assert command(["show", "nowhere"]) == 2
    assert command(["show"]) == 2


def test_the_doctor_says_what_is_wrong(wide, capsys):
    assert command(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and "ray" in out and "GB free" in out
    assert command(["doctor", "dataset=images", "dataset.path=nowhere"]) == 2
    told = capsys.readouterr()
    assert "dataset.path=nowhere does not exist" in told.out and "see Overrides" in told.err
    (wide / "outputs").touch()  # a file where the results should go
    assert doctor.writable("Results", wide / "outputs").verdict == "bad"
    assert doctor.writable("Results", wide / "not" / "yet").verdict == "good"


def test_packages_that_are_missing_or_of_another_version():
    need = doctor.Requirement
    assert doctor.unmet(need("torch>=2"), "") == ""
    assert "is installed: pip install" in doctor.unmet(need("torch<1"), "")
    assert doctor.unmet(need("no-such-package"), "slurm") == 'not installed: pip install "fedfrozen[slurm]"'


@pytest.fixture(scope="module")
def bash():
    return script("bash", words())


def complete(bash, line):
    lines = [bash, f"COMP_LINE='{line}'; COMP_POINT={len(line)}; _fedfrozen 2>/dev/null"]
    lines.append('printf "%s\\n" "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.slow
def test_bash_completes_verbs_groups_and_keys(bash):
    assert complete(bash, "fedfrozen com") == ["compare", "completion"]
    assert set(complete(bash, "fedfrozen strategy=")) >= {"fedavg", "fedprox", "fedfrozen", "local"}
    assert complete(bash, "fedfrozen seed=1 num_r") == ["num_rounds="]
    assert complete(bash, "fedfrozen strategy.mu") == ["strategy.mu="]
    assert complete(bash, "fedfrozen nothing_like_it") == []


@pytest.mark.slow
def test_other_shells_and_verbs(capsys):
    for shell, begins in (("zsh", "autoload"), ("fish", "complete -c fedfrozen")):
        assert command(["completion", shell]) == 0
        told = capsys.readouterr().out
        assert told.startswith(begins) and all(f"{verb} " in told for verb in VERBS)
    assert command(["completion", "cmd"]) == 2


def test_every_verb_leads_to_a_function():
    import importlib

    for place in VERBS.values():
        module, _, function = place.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
