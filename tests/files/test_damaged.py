"""Damaged files: every verb names them, and no number is silently wrong.

The table of all: `python -m tests.files.damage`.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedfrozen_app.commands.training import ended_text
from fedfrozen_app.core.errors import RunFailed
from fedfrozen_app.files import checkpoint, status
from fedfrozen_app.files import folder_manifest as manifest
from fedfrozen_app.files.disk import header, replace_file, save_tensors
from fedfrozen_app.run.federate import explain_disk_errors
from tests.conftest import Run, same_bits
from tests.files.damage import (
    FAULTS,
    RUN_VERBS,
    SWEEP_VERBS,
    TABLES,
    TINY,
    WRONG,
    Outcome,
    as_nobody,
    bench,
    carry_out,
    command,
    empty,
    flip_bit,
    foreign_bytes,
    truncate,
    verdict,
)

REFUSED, DONE, EXIT_1, EVER = "told, refused", "told, done", "told, exit 1", "as ever"
CELLS = [
    ("model.safetensors", "bit flip", "evaluate", REFUSED),
    ("model.safetensors", "bit flip", "export", REFUSED),
    ("model.safetensors", "bit flip", "repair", DONE),
    ("status.json", "foreign bytes", "show", REFUSED),
    ("status.json", "foreign bytes", "list", DONE),
    ("summary.json", "foreign bytes", "report", REFUSED),
    ("fairness.json", "foreign bytes", "report", REFUSED),
    ("manifest.jsonl", "truncated", "compare", REFUSED),
    ("data.json", "bit flip", "report", DONE),
    ("report.html", "missing", "verify", EXIT_1),
    ("metrics.jsonl", "missing", "list", EVER),
]


@pytest.fixture(scope="module")
def place():
    with bench() as found:
        yield found


@pytest.mark.parametrize(("file", "fault", "verb", "expected"), CELLS)
def test_a_damaged_file_is_named(place, file, fault, verb, expected):
    outcome, clean = place.outcome("run", file, fault, verb)
    assert verdict(outcome, clean, file) == expected, outcome.text


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TABLES)
def test_every_file_every_fault_every_verb(place, name):
    files, verbs = TABLES[name]
    wrong = []
    for file in files:
        for fault in FAULTS:
            for verb in verbs:
                found = verdict(*place.outcome(name, file, fault, verb), file)
                if found in WRONG:
                    wrong.append((file, fault, verb, found))
    assert not wrong, wrong


def test_resume_goes_on_from_the_newest_checkpoint_that_is_whole(place):
    run = place.fresh("run")
    whole = Run(run).model
    flip_bit(run / "checkpoints" / "2" / "model.safetensors")
    status.write(run, status.replace(status.read(run), state="interrupted"))
    done = carry_out(RUN_VERBS["resume"], run)
    assert done.code == 0, done.text
    assert "that of round 2 is damaged; the newest whole one is that of round 1" in done.text
    assert "Going on after round 1" in done.text
    assert same_bits(Run(run).model, whole)
    assert checkpoint.read(run / "checkpoints" / "2").round == 2  # written again
    assert carry_out(RUN_VERBS["verify"], run).code == 0


@pytest.fixture
def private(tmp_path):
    """A folder with a run in it that begins, and a function that looks at it as somebody else."""
    place = Path(tempfile.mkdtemp(prefix="private-"))
    manifest.begin(folder_in(place / "run"), manifest.RUN)
    status.write(place / "run", status.Status(state="interrupted"))
    (place / "run" / "checkpoints" / "1").mkdir(parents=True)

    def look(hidden: Path, *words: str) -> Outcome:
        hidden.chmod(0)
        with as_nobody(place):
            return carry_out(lambda _: command([*words]), place)

    yield place, look
    shutil.rmtree(place)


def folder_in(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


@pytest.mark.skipif(os.getuid() > 0, reason="becomes somebody else")
def test_checkpoints_that_may_not_be_read_are_not_whole(private):
    place, look = private
    run = place / "run"
    done = look(run / "checkpoints", "verify", str(run))
    assert done.code == 1 and "damaged: checkpoints (it cannot be read: Permission denied)" in done.text
    done = look(run / "checkpoints", "resume", str(run))
    assert done.code == 2 and f"{run}/checkpoints cannot be read (Permission denied)" in done.text


@pytest.mark.skipif(os.getuid() > 0, reason="becomes somebody else")
@pytest.mark.parametrize("words", [("verify", "run"), ("report", "run"), ("list", "run"), ("compare", "run")])
def test_a_run_whose_folder_may_not_be_read_is_not_said_to_be_none(private, words):
    place, look = private
    done = look(place / "run", words[0], str(place / words[1]))
    assert done.code == 2 and f"{place}/run cannot be read (Permission denied)" in done.text, done.text


@pytest.mark.skipif(os.getuid() > 0, reason="becomes somebody else")
@pytest.mark.parametrize("verb", ["list", "compare", "verify"])
def test_a_run_that_may_not_be_read_is_named_among_the_others(private, verb):
    place, look = private
    manifest.begin(folder_in(place / "other"), manifest.RUN)
    status.write(place / "other", status.Status(state="complete"))
    carry_out(lambda _: command([verb, str(place)]), place)  # what it composes is remembered
    done = look(place / "run", verb, str(place))
    assert f"{place}/run cannot be read (Permission denied)" in done.text, done.text
    assert done.code == {"list": 0, "compare": 2, "verify": 1}[verb]


@pytest.mark.parametrize("name", ["status.json", "report.html"])
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError) as found:
        replace_file(tmp_path / name, "text")
    assert found.value.filename == str(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_only_a_full_disk_asks_for_room(tmp_path):
    (tmp_path / "file").mkdir()
    words = r"could not be written .*Is a directory.*: correct that, then start"
    with pytest.raises(RunFailed, match=words), explain_disk_errors(tmp_path):
        replace_file(tmp_path / "file", "text")


def test_a_clock_that_goes_back_ends_no_run_before_it_started(tmp_path, monkeypatch):
    moments = iter(["2026-03-01T12:00:00+01:00", "2026-03-01T11:00:00+01:00"])
    monkeypatch.setattr(status, "now", lambda: next(moments))
    with status.recorded(tmp_path, {}, []):
        pass
    known = status.read(tmp_path)
    assert known.state == "complete" and known.ended == known.started == "2026-03-01T12:00:00+01:00"


@pytest.mark.parametrize("state", ["interrupted", "failed", "running"])
def test_attach_to_a_run_that_has_ended_names_resume(tmp_path, state):
    known = status.Status(state=state, flower_run=7)
    assert ended_text(tmp_path, known).endswith("wrote no checkpoint: start it again.")
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    text = ended_text(tmp_path, known)
    assert text.endswith(f"go on after round 4 with fedfrozen resume {tmp_path}.")
    assert ("its process was lost" in text) == (state == "running")


def test_a_manifest_without_its_end_is_damaged_but_not_that_of_a_run_that_was_killed(tmp_path):
    manifest.begin(tmp_path, manifest.RUN)
    with (tmp_path / manifest.FILE).open("a") as file:
        file.write("0123abcd {")
    assert not manifest.read(tmp_path).damage
    (tmp_path / "summary.json").write_text("{}")
    assert manifest.read(tmp_path).damage == "its end is missing"
    manifest.begin(tmp_path, manifest.RUN)  # it goes on
    assert not manifest.read(tmp_path).damage


@pytest.mark.parametrize("fault", [flip_bit, truncate, empty])
def test_a_run_goes_over_one_whose_manifest_is_damaged(place, fault):
    run = place.fresh("run")
    fault(run / "manifest.jsonl")
    done = carry_out(lambda _: command([*TINY, f"output_dir={run}", "overwrite=true"]), run)
    assert done.code == 0, done.text
    assert same_bits(Run(run).model, Run(place.kept / "run").model)
    assert carry_out(RUN_VERBS["verify"], run).code == 0


@pytest.mark.parametrize("fault", [flip_bit, truncate])
def test_a_run_whose_manifest_is_damaged_is_resumed(place, fault):
    run = place.fresh("run")
    status.write(run, status.replace(status.read(run), state="interrupted"))
    shutil.rmtree(run / "checkpoints" / "2")
    fault(run / "manifest.jsonl")
    done = carry_out(RUN_VERBS["resume"], run)
    assert done.code == 0 and "manifest.jsonl was written again" in done.text, done.text
    assert same_bits(Run(run).model, Run(place.kept / "run").model)
    assert carry_out(RUN_VERBS["verify"], run).code == 0


@pytest.mark.parametrize("more", [b'{"round": 3, "test_accuracy": 0.99}\n', None])
def test_a_row_that_somebody_added_to_a_finished_run_is_damage(place, more):
    run = place.fresh("run")
    rows = run / "metrics.jsonl"
    content = rows.read_bytes()
    rows.write_bytes(content + (more or content.splitlines(keepends=True)[-1]))
    for verb in ("report", "compare"):
        done = carry_out(RUN_VERBS[verb], run)
        assert done.code == 2 and "metrics.jsonl is damaged (it has 4 rows, and 3 were written)" in done.text
    assert carry_out(RUN_VERBS["extend"], run).code == 0  # keeps those that are whole
    assert [row["round"] for row in Run(run).rows] == [0, 1, 2, 3]
    assert Run(run).rows[3]["test_accuracy"] != 0.99


@pytest.mark.parametrize("name", ["fairness.json", "data.json", "labels.png", "report.html"])
def test_a_file_that_is_gone_is_missed_once(place, name):
    """`--repair` cannot bring most of them back, and its advice was to repair."""
    run = place.fresh("run")
    (run / name).unlink()
    assert carry_out(RUN_VERBS["verify"], run).code == 1
    done = carry_out(RUN_VERBS["repair"], run)
    assert done.code == 0 and (run / name).exists() == (name == "report.html"), done.text
    assert name in done.text
    again = carry_out(RUN_VERBS["repair"], run)
    assert again.code == 0 and "repaired" not in again.text


def test_a_manifest_that_was_cut_between_two_lines_is_damage(place):
    """Each line that is left is as it was written."""
    run = place.fresh("run")
    lines = (run / "manifest.jsonl").read_bytes().splitlines(keepends=True)
    (run / "manifest.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]))
    done = carry_out(RUN_VERBS["verify"], run)
    assert done.code == 1 and "manifest.jsonl (its end is missing)" in done.text
    assert "repaired" in carry_out(RUN_VERBS["repair"], run).text
    assert carry_out(RUN_VERBS["verify"], run).code == 0


@pytest.mark.parametrize("lost", [empty, truncate])
def test_a_lost_manifest_makes_no_damaged_file_whole(place, lost):
    run = place.fresh("run")
    lost(run / "manifest.jsonl")
    flip_bit(run / "model.safetensors")
    truncate(run / "summary.json")
    done = carry_out(RUN_VERBS["repair"], run)
    assert "model.safetensors was restored from checkpoints/2." in done.text, done.text
    assert "summary.json was rebuilt" in done.text and done.code == 0
    assert same_bits(Run(run).model, Run(place.kept / "run").model)
    assert json.loads((run / "summary.json").read_text())["final_test_accuracy"] is not None
    assert status.read(run).state == "complete"


def test_the_same_arrays_and_marks_are_the_same_bytes(tmp_path):
    """The library orders what a header says by chance: then `--repair` finds no checkpoint like the final
    model of a run whose header says two things, as those of text and tables do."""
    marks = {"tokenizer": "ab" * 32, "privacy": "ε at most 8", "round": "2", "audit": 'a "quote"\n'}
    arrays = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(3)}
    for number in range(8):
        save_tensors(arrays, tmp_path / str(number), marks)
    assert len({(tmp_path / str(number)).read_bytes() for number in range(8)}) == 1
    assert header(tmp_path / "0") == marks
    found = load_file(tmp_path / "0")
    assert all(found[name].equal(value) for name, value in arrays.items())


@pytest.mark.slow
def test_the_final_model_of_a_text_run_is_restored_from_its_checkpoint(place):
    for number in range(3):  # by chance it was
        shutil.rmtree(place.kept / "text", ignore_errors=True)
        run = place.fresh("text")
        flip_bit(run / "model.safetensors")
        done = carry_out(RUN_VERBS["repair"], run)
        assert done.code == 0 and "model.safetensors was restored from checkpoints/2." in done.text, number
        assert same_bits(Run(run).model, Run(place.kept / "text").model)


# One folder is one thing ----------------------------------------------------------------------------------


def make(folder, kind: str) -> None:
    folder.mkdir(parents=True)
    manifest.begin(folder, kind)


@pytest.mark.parametrize(
    ("there", "kind", "words", "sentence"),
    [
        ("run", "run", ["-m", "seed=0,1", "output_dir={}/run"], "holds a run, and a sweep needs a folder"),
        ("sweep", "sweep", ["output_dir={}/sweep"], "holds a sweep, and a run needs a folder"),
        ("run", "run", ["output_dir={}/run/checkpoints"], "lies inside the run"),
        ("run", "run", ["-m", "seed=0,1", "output_dir={}/run/more"], "lies inside the run"),
        ("sweep", "sweep", ["-m", "seed=0,1", "output_dir={}/sweep/0"], "lies inside the sweep"),
        ("sweep", "sweep", ["output_dir={}/sweep/new"], "lies inside the sweep"),
        ("outer/run", "run", ["output_dir={}/outer"], "holds other runs"),
        ("outer/deep/run", "run", ["-m", "seed=0,1", "output_dir={}/outer"], "holds other runs"),
        ("run", "run", ["census", "output_dir={}/run"], "holds a run, and a census needs a folder"),
        ("run", "run", ["theory", "output_dir={}/run"], "holds a run, and a theory study needs a folder"),
        ("sweep", "sweep", ["theory", "output_dir={}/sweep/0"], "holds a sweep, and a theory study needs"),
        ("run", "run", ["export", "{}/run", "{}/run/checkpoints/9"], "holds a run, and an export needs"),
        ("sweep", "sweep", ["export", "{}", "{}/sweep/2"], "holds a sweep, and an export needs a folder"),
        ("run", "run", ["align", "{}/run"], "holds a run, and a dual encoder needs a folder"),
        ("run", "run", ["compare", "{}/one", "--out", "{}/run/a"], "holds a run, and a comparison needs"),
        ("run", "run", ["compare", "{}/one", "--out", "{}/run"], "is a run, and not what is compared"),
        ("sweep", "sweep", ["compare", "{}/one", "{}", "--out", "{}/sweep"], "is a sweep, and not what is"),
    ],
)
def test_a_folder_is_a_run_or_a_sweep_and_nothing_else(tmp_path, there, kind, words, sentence):
    make(tmp_path / there, kind)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    done = carry_out(lambda place: command([word.format(place) for word in words]), tmp_path)
    assert done.code == 2 and sentence in done.text, done.text
    assert done.text.count("\n") == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_folder_of_an_older_version_is_known_by_its_files(tmp_path):
    (tmp_path / "run").mkdir()
    status.write(tmp_path / "run", status.Status(state="complete"))
    words = ["-m", "seed=0,1", f"output_dir={tmp_path}/run"]
    done = carry_out(lambda _: command(words), tmp_path)
    assert done.code == 2 and "holds a run" in done.text


# Sweeps ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [truncate, foreign_bytes])
@pytest.mark.parametrize("name", ["summary.json", "status.json", "manifest.jsonl", "model.safetensors"])
def test_a_sweep_that_is_given_again_mends_its_damaged_member(place, name, fault):
    sweep = place.fresh("sweep")
    clean = carry_out(SWEEP_VERBS["compare"], sweep).out
    fault(sweep / "0" / name)
    done = carry_out(SWEEP_VERBS["sweep again"], sweep)
    assert done.code == 0 and name in done.text, done.text
    assert carry_out(SWEEP_VERBS["verify"], sweep).code == 0
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == [".sweeps", "0", "1"]
    again = carry_out(SWEEP_VERBS["compare"], sweep).out
    assert again.split("seconds")[0] == clean.split("seconds")[0]


@pytest.mark.slow
def test_one_unreadable_member_does_not_stop_the_comparison_of_the_others(place):
    sweep = place.fresh("sweep")
    foreign_bytes(sweep / "0" / "metrics.jsonl")
    done = carry_out(SWEEP_VERBS["compare"], sweep)
    assert done.code == 0 and f"Left out: {sweep}/0: its metrics.jsonl is damaged" in done.text
    shutil.rmtree(sweep / "1")
    done = carry_out(SWEEP_VERBS["compare"], sweep)
    assert done.code == 2 and "There is no finished run to compare" in done.text
