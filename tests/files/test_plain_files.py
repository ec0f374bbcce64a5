"""A run folder that somebody else made leads no verb to other files."""

import os

import pytest

import fedfrozen
from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import folder_manifest as manifest
from fedfrozen_app.files import status
from tests.files.damage import TINY

VERBS = [
    ["verify"],
    ["verify", "--repair"],
    ["report"],
    ["show"],
    ["resume"],
    ["evaluate"],
    ["compare"],
    ["export"],
]


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "runs" / "one"
    found.mkdir(parents=True)
    manifest.begin(found, manifest.RUN)
    (found / "checkpoints").mkdir()
    return found


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
@pytest.mark.parametrize("place", ["notes.txt.damaged", ".manifest.jsonl.part", "checkpoints/1"])
def test_a_link_in_a_run_folder_is_refused_before_anything_is_read_or_written(
    tmp_path, folder, capsys, words, place
):
    """`verify --repair` wrote the folder's texts through such links into any file of the reader."""
    target = tmp_path / "authorized_keys"
    target.write_text("mine")
    (folder / place).symlink_to(target)
    more = [str(tmp_path / "exported")] if words == ["export"] else []
    assert command([words[0], str(folder), *words[1:], *more]) == 2
    told = capsys.readouterr().err
    assert f"{place} is a link, and a run folder holds plain files" in told
    assert target.read_text() == "mine" and not (tmp_path / "exported").exists()


@pytest.mark.parametrize("verb", ["list", "compare"])
def test_nor_is_it_among_others(folder, capsys, verb):
    (folder / "lost").symlink_to("nowhere")
    assert command([verb, str(folder.parent)]) == 2 and "lost is a link" in capsys.readouterr().err
    with pytest.raises(UserError, match="lost is a link"):
        fedfrozen.load(folder)


@pytest.mark.parametrize("words", [["num_rounds=1"], ["-m", "seed=0,1"]])
def test_no_run_begins_where_a_link_would_hide_it_from_every_verb(tmp_path, capsys, words):
    (tmp_path / "project" / ".venv").mkdir(parents=True)
    (tmp_path / "project" / ".venv" / "python").symlink_to("/usr/bin/env")
    before = sorted(tmp_path.rglob("*"))
    assert command([*TINY, *words, f"output_dir={tmp_path}/project"]) == 2
    told = capsys.readouterr().err
    assert ".venv/python is a link, and a run folder holds plain files: give another output_dir." in told
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("words", [["verify", "{}"], ["report", "{}"], [*TINY, "output_dir={}"]])
def test_a_link_to_itself_is_one_sentence(tmp_path, capsys, words):
    (tmp_path / "loop").symlink_to("loop")
    assert command([word.format(tmp_path / "loop") for word in words]) == 2
    assert "loop" in capsys.readouterr().err


def test_a_folder_in_the_place_of_a_file_says_what_to_do(folder, capsys):
    status.write(folder, status.Status(state="interrupted"))
    (folder / "lease.json").mkdir()
    assert command(["verify", str(folder), "--repair"]) == 2
    assert "A file belongs there: move the folder away." in capsys.readouterr().err


def test_a_pipe_would_be_waited_for(folder, capsys):
    os.mkfifo(folder / "summary.json")
    assert command(["show", str(folder)]) == 2 and "no file or folder" in capsys.readouterr().err


def test_a_link_to_a_run_is_its_owner_s(folder, tmp_path, capsys):
    """Only what lies within is the author's."""
    (tmp_path / "latest").symlink_to(folder)
    command(["show", str(tmp_path / "latest")])
    assert "is a link" not in capsys.readouterr().err
