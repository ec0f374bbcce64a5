"""The command as a person meets it: bad input, verbs, multirun, files."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from transformers import AutoModelForImageClassification

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.files import status
from fedfrozen_app.run import evaluation, prepare
from tests.conftest import SMALL, Run, full_disk


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["strategy=nope"],
            f"Unknown strategy 'nope': choose one of {', '.join(sorted(registry.BUILT_IN['strategies']))}.",
        ),
        (["model=nope"], "Unknown model 'nope'"),
        (["participation=0"], "participation=0.0 is out of range: it must be above 0 and at most 1."),
        (["participation=1.5"], "participation=1.5"),
        (["num_rounds=5", "strategy.warmup_rounds=6"], "lower it, or raise num_rounds."),
        (["num_clients=500"], "set num_clients to 129 or fewer"),
        (["dataset=images", "dataset.path=nowhere"], "dataset.path=nowhere does not exist"),
        (["model=checkpoint", "model.path=nowhere"], "model.path=nowhere does not exist"),
        (["model=checkpoint"], "model.path is not set"),
        (["dataset=text"], "dataset.path"),
        (["num_rounds=many"], "num_rounds: Value 'many'"),
        (["num_round=5"], "did you mean num_rounds?"),
        (["client.learning_rate=1"], "There is no key 'client.learning_rate'"),
        (["strategy=fedprox", "strategy.mu=-1"], "strategy.mu=-1 is negative"),
        (["strategy=fedprox", "strategy.mu=nan"], "strategy.mu=nan is out of range"),
        (["strategy=pfeddc", "strategy.mu=inf"], "strategy.mu=inf is out of range"),
        (["client.lr=inf"], "client.lr=inf is out of range: it must be above 0 and finite."),
        (["seed=-1"], "seed=-1 is out of range"),
        (["strategy=null"], "takes the name of one of its files"),
        (["-m", "strategy=fedavg,null"], "takes the name of one of its files"),
        (["--cfg", "job", "strategy=5"], "takes the name of one of its files"),
        (["+strategy.foo=1"], "There is no key 'strategy.foo' in this configuration"),
        (["strategy=fedavg,fedprox"], "add -m to run each of them"),
        (["num_rounds =5"], "'num_rounds =5' cannot be read: write KEY=VALUE"),
        (["--num_rounds=5"], "write num_rounds=5"),
        (["strategy.freeze_scope=all"], "strategy.freeze_scope=all is unknown"),
        (["model=linear"], "no attention kernel"),
        (["client.lr=0"], "client.lr=0.0 is out of range"),
        (["client.precision=bf16", "model.dtype=float64"], "autocast leaves"),
        (["from=nowhere/checkpoints/3"], "from=nowhere/checkpoints/3 does not exist"),
        (["model.config.num_attention_heads=5"], "5"),
        (["partition=natural"], "column"),
        (["num_rounds"], "num_rounds"),
        (["resume"], "Say which run"),
        (["compair", "outputs"], "did you mean compare?"),
        (["strategy=fedavg", "strategy.warmup_rounds=1"], "The chosen strategy has no key"),
        (["resume", "nowhere"], "There is no run folder nowhere"),
        (["export", "nowhere", "there"], "There is no run folder nowhere"),
        (["--bogus"], "Unrecognized arguments: --bogus: see fedfrozen --help."),
        (["-m", "--bogus", "seed=0,1"], "Unrecognized arguments: --bogus: see fedfrozen --help."),
        (["theory", "--bogus"], "Unrecognized arguments: --bogus: see fedfrozen theory --help."),
        (["compare", "nowhere", "--bogus"], "arguments: --bogus: see fedfrozen compare --help."),
        (["compare", "--figure", "mean"], "see fedfrozen compare --help."),
        (["provision", "federation.yaml"], "are required: -o/--output: see fedfrozen provision --help."),
        (["site", "check", "--bogus"], "Unrecognized arguments: --bogus: see fedfrozen site check --help."),
        (["search", "--trials", "many"], "invalid int value: 'many': see fedfrozen search --help."),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(overrides, told, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert command(overrides) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedfrozen: ")]
    assert len(lines) == 1 and told in lines[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(capsys):
    assert command(["device=cuda"]) == 2
    assert "torch sees no GPU: use device=cpu or device=auto" in capsys.readouterr().err


def test_bad_input_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(["participation=0"]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["output_dir=file"], ["output_dir=file/below"], []])
def test_an_output_folder_that_cannot_be_written(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "outputs").touch()  # the default's folder
    assert command([*SMALL, *words]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_named_output_folder_is_the_only_one_and_may_lie_at_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", f"{tmp_path}/my home")
    assert command([*SMALL, "num_rounds=0", "output_dir='~/run'"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["my home"]
    assert (tmp_path / "my home" / "run" / "summary.json").is_file()


def test_a_run_leaves_what_the_contract_says(tmp_path):
    folder = tmp_path / "run"
    assert command([*SMALL, f"hydra.run.dir={folder}"]) == 0
    run = Run(folder)
    for name in ("model.safetensors", "report.html", "curves.png", "labels.png", "checkpoints/3/state.json"):
        assert (folder / name).exists(), name
    for name in ("model.safetensors", "best.safetensors"):  # for whoever may read the figures
        assert (folder / name).stat().st_mode == (folder / "summary.json").stat().st_mode
    sizes = json.loads((folder / "clients.json").read_text())
    assert list(sizes) == ["0", "1", "2"] and all(0 < one["held_out"] < one["rows"] for one in sizes.values())
    assert "rows held out" in (folder / "report.html").read_text()
    row = run.rows[-1]
    for key in (
        *("round", "stage", "test_loss", "test_accuracy", "train_loss", "bytes_up", "bytes_down"),
        *("bytes_up_by_role", "trained_params", "clients_ok", "clients_failed", "seconds", "drift"),
    ):
        assert key in row, key
    summary = run.summary
    for key in (
        *("final_test_accuracy", "best_test_accuracy", "stability", "total_bytes_up", "total_bytes_down"),
        *("seconds", "config", "versions", "git_commit", "seed", "device"),
    ):
        assert key in summary, key
    assert summary["config"]["dataset"]["name"] == "digits"
    assert summary["config"]["strategy"]["warmup_rounds"] == 2  # the default, half of three, is filled in
    assert summary["total_bytes_up"] == sum(row["bytes_up"] for row in run.rows[1:])
    assert summary["status"] == "completed"


def test_verbs_on_a_finished_run(tmp_path, capsys):
    folder = tmp_path / "run"
    assert command([*SMALL, f"hydra.run.dir={folder}"]) == 0
    capsys.readouterr()

    assert command(["evaluate", str(folder)]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["test_accuracy"] == Run(folder).summary["final_test_accuracy"]

    assert command(["resume", str(folder)]) == 2
    assert "already finished its 3 rounds" in capsys.readouterr().err
    longer = (folder / "metrics.jsonl").read_text().replace('"total": ', '"total": 100')
    (folder / "metrics.jsonl").write_text(longer)
    (folder / "manifest.jsonl").unlink()  # as in a folder of an earlier version
    assert command(["resume", str(folder), "num_rounds=4"]) == 0
    rows = Run(folder).rows
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4]
    # Of all rounds, as the bytes are: at least what the rows tell.
    assert Run(folder).summary["seconds"] >= sum(row["seconds"]["total"] for row in rows)

    assert command(["export", str(folder), str(tmp_path / "exported")]) == 0
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "exported")
    assert loaded.config.id2label[3] == "3"
    for name, value in loaded.named_parameters():
        assert torch.equal(value, Run(folder).model[name])


def test_a_disk_that_is_full_from_the_start_is_a_sentence(tmp_path, capsys):
    """There is no room for the last words of a run: nothing begins, and the same command begins later."""
    folder = tmp_path / "run"
    with full_disk(8_000):
        assert command([*SMALL, f"output_dir={folder}"]) == 1
    errors = capsys.readouterr().err
    assert "File too large): make room there, then give the same command again." in errors
    assert "resume" not in errors
    assert command([*SMALL, f"output_dir={folder}"]) == 0
    assert status.read(folder).state == "complete"


@pytest.mark.slow
def test_resume_writes_what_the_end_of_a_run_left_out(tmp_path, capsys):
    """All rounds are done, and then the disk is full, or somebody presses Ctrl-C again."""
    folder = tmp_path / "run"
    with full_disk(30_000), pytest.MonkeyPatch.context() as roomy:
        roomy.setattr(evaluation, "draw_labels", lambda *args: None)
        assert command([*SMALL, f"output_dir={folder}"]) == 1
    assert f"fedfrozen resume {folder}" in capsys.readouterr().err
    assert not (folder / "curves.png").exists()
    before = [row["test_loss"] for row in Run(folder).rows]

    assert command(["resume", str(folder)]) == 0
    assert (folder / "curves.png").exists() and (folder / "report.html").exists()
    assert [row["test_loss"] for row in Run(folder).rows] == before
    assert status.read(folder).state == "complete"
    assert command(["resume", str(folder)]) == 2


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_is_left_alone(tmp_path, capsys):
    folder = tmp_path / "run"
    assert command([*SMALL, "num_rounds=1", f"output_dir={folder}"]) == 0
    before = (folder / "metrics.jsonl").read_text()
    other = replace(status.read(folder), state="running", **asdict(status.Owner.of(os.getppid())))
    status.write(folder, other)
    for words in (["resume", str(folder), "num_rounds=2"], [*SMALL, f"output_dir={folder}"]):
        capsys.readouterr()
        assert command(words) == 2
        assert f"is being run by process {os.getppid()}" in capsys.readouterr().err
    assert status.read(folder) == other and (folder / "metrics.jsonl").read_text() == before


def test_a_run_stops_when_validation_gets_no_better(train):
    run = train("early_stop.patience=2", "num_rounds=9", "client.lr=1e-9")
    assert run.summary["status"] == "stopped early" and run.summary["rounds"] == 3


@pytest.mark.parametrize("words", ["dataset.validation=0", "strategy=local"])
def test_a_run_without_anything_to_stop_by_does_not_begin(train, words):
    with pytest.raises(UserError, match="patience goes by"):
        train("early_stop.patience=2", words)


EARLY = ["strategy.warmup_rounds=auto", "strategy.warmup_threshold=10", "strategy.warmup_patience=1"]
EARLY += ["strategy.warmup_span=1", "strategy.warmup_progress=1"]


@pytest.mark.parametrize(("warmup", "words"), [(1, []), (2, EARLY)], ids=["half", "auto"])
@pytest.mark.slow
def test_what_is_frozen_does_not_thaw_when_a_run_is_made_longer(train, warmup, words):
    """Half of two rounds is one round of warm-up, half of twenty are ten; auto's least is a tenth."""
    run = train(f"num_rounds={warmup + 1}", "client.local_steps=2", *words)
    assert command(["resume", str(run.folder), "num_rounds=20"]) == 0
    assert [row["stage"] for row in run.rows] == [
        "initial",
        *warmup * ["warmup"],
        *(20 - warmup) * ["frozen"],
    ]
    assert command(["resume", str(run.folder), "num_rounds=21", "strategy.warmup_rounds=21"]) == 0
    assert run.rows[-1]["stage"] == "warmup"  # whoever says so is obeyed


@pytest.mark.slow
def test_a_run_whose_clients_shared_nothing_has_no_model_to_give(train, tmp_path, capsys):
    """Its model.safetensors is what every client began with."""
    run = train("strategy=local", "num_rounds=1")
    for words in (["evaluate", str(run.folder)], ["export", str(run.folder), str(tmp_path / "exported")]):
        assert command(words) == 2
        assert "shared nothing" in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()


@pytest.mark.slow
def test_an_export_that_cannot_be_written_ends_with_a_sentence(train, tmp_path, capsys):
    run = train("num_rounds=1")
    (tmp_path / "taken").touch()
    assert command(["export", str(run.folder), str(tmp_path / "taken" / "below")]) == 2
    assert "cannot be written (Not a directory): give another" in capsys.readouterr().err
    with full_disk(1_000):
        assert command(["export", str(run.folder), str(tmp_path / "full")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_s_folder_may_be_named_after_its_settings(train, capsys):
    """As Hydra names them with hydra.sweep.subdir=${hydra.job.override_dirname}."""
    run = train("num_rounds=1", folder="num_rounds=1,seed=0")
    assert command(["resume", str(run.folder), "num_rounds=2"]) == 0
    assert command(["evaluate", str(run.folder)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["run"] == str(run.folder)


def test_resume_says_what_it_does_not_heed(train, capsys):
    run = train("num_rounds=2")
    for word in (f"from={run.folder}/checkpoints/1", "output_dir=elsewhere"):
        assert command(["resume", str(run.folder), "num_rounds=3", word]) == 2
        assert f"leave {word} out" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_failure_and_ends_with_its_code(tmp_path, capsys):
    words = ["-m", *SMALL, "num_clients=3,500", f"hydra.sweep.dir={tmp_path}/sweep"]
    assert command(words) == 2
    assert "500 clients" in capsys.readouterr().err
    assert Run(tmp_path / "sweep" / "0").summary["status"] == "completed"


def test_ctrl_c_keeps_the_work_and_says_how_to_go_on(tmp_path):
    """In a process of its own, as a person would."""
    folder = tmp_path / "run"
    words = [sys.executable, "-m", "fedfrozen_app", *SMALL, "num_rounds=500", f"hydra.run.dir={folder}"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in child.stdout:
        if line.startswith("round 2/"):
            child.send_signal(2)
            break
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert f"fedfrozen resume {folder}" in errors and "Traceback" not in errors
    run = Run(folder)
    assert run.summary["status"] == "interrupted" and len(run.rows) >= 3


@pytest.mark.slow
def test_local_only_is_a_baseline_with_its_own_figures(train):
    run = train("strategy=local")
    row = run.rows[-1]
    assert row["bytes_up_by_role"] == {} and row["trained_params"] > 0
    assert row["test_accuracy"] != run.rows[0]["test_accuracy"]
    assert row["train_loss"] < run.rows[1]["train_loss"]


@pytest.mark.slow
def test_a_run_finds_its_files_from_another_directory(tmp_path, monkeypatch, capsys):
    """And not others of the same name that lie there."""
    rows = [
        f"{word} {number},{label}" for number in range(30) for word, label in (("a b", "x"), ("c d", "y"))
    ]
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes.csv").write_text("\n".join(["text,label", *rows]))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "notes.csv").write_text("not,the,same")
    monkeypatch.chdir(tmp_path / "here")
    words = ["dataset=text", "dataset.path=notes.csv", "model=bert_tiny", "num_clients=2", "num_rounds=1"]
    assert command([*words, "strategy=fedavg", "output_dir=first"]) == 0
    assert command([*words, "num_rounds=2", "from=first/checkpoints/1", "output_dir=fork"]) == 0
    shutil.rmtree("first")  # a fork stands on its own once it has begun
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    assert command(["resume", "../here/fork", "num_rounds=3"]) == 0
    (tmp_path / "here" / "notes.csv").rename(tmp_path / "here" / "moved.csv")
    assert command(["resume", "../here/fork", "num_rounds=4", "dataset.path=../here/moved.csv"]) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert command(["evaluate", "here/fork"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 12


def test_a_fork_that_would_train_nothing_is_refused(train, tmp_path, capsys):
    train("num_rounds=2", folder="origin")
    origin = tmp_path / "origin" / "checkpoints" / "2"
    assert command([*SMALL, "num_rounds=2", f"from={origin}", f"output_dir={tmp_path}/fork"]) == 2
    assert "leaves nothing to train: raise num_rounds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["aggregation=krum", "aggregation.malicious=1"], "needs 4 clients in a round, and there are 3"),
        (["checkpoint.uploads=3"], "checkpoint.uploads=3 is no client: give a number from 0 to 2."),
    ],
)
def test_what_these_clients_cannot_do_is_refused(words, told, train):
    with pytest.raises(UserError, match=re.escape(told)):
        train(*words)


@pytest.mark.slow
def test_a_run_whose_every_round_was_discarded_has_failed(train, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "check_cohort", lambda how, size: None)  # as with sites
    with pytest.raises(RunFailed, match="No round changed the model: 3 sound replies came"):
        train("aggregation=krum", "aggregation.malicious=1")
    assert Run(tmp_path / "run").summary["status"] == "failed"


def test_a_damaged_run_is_bad_input_to_every_verb(train, tmp_path, capsys):
    run = train("num_rounds=1").folder
    good = {
        name: (run / name).read_bytes() for name in ("summary.json", "model.safetensors", "metrics.jsonl")
    }
    cases = {
        "summary.json": (b"", b"[]", b"\xff\xfe"),
        "model.safetensors": (b"", good["model.safetensors"][:-9]),
        "metrics.jsonl": (b"\xff\xfe\n",),
    }
    for name, contents in cases.items():
        for content in contents:
            (run / name).write_bytes(content)
            verbs = ("show", "report") if name == "metrics.jsonl" else ("evaluate",)
            for verb in verbs:
                assert command([verb, str(run)]) == 2, (verb, name, content)
                assert capsys.readouterr().err.count("fedfrozen: ") == 1
        (run / name).write_bytes(good[name])


@pytest.mark.slow
def test_another_model_is_not_judged_by_half(train, capsys):
    """A layer that the run never had would be judged with random values."""
    run = train("num_rounds=1").folder
    for setting in ("num_hidden_layers=3", "num_hidden_layers=1", "intermediate_size=48"):
        assert command(["evaluate", str(run), f"model.config.{setting}"]) == 2
        assert "is not the one these settings make" in capsys.readouterr().err
