"""One file from which others run a sweep again: whole, changed in eight ways, hostile."""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.capsule import environment
from fedfrozen_app.capsule.claims import again
from fedfrozen_app.capsule.crate import About
from fedfrozen_app.capsule.environment import sources_of_wheel
from fedfrozen_app.capsule.opened import open_capsule
from fedfrozen_app.capsule.places import Place, files_of, portable_words
from fedfrozen_app.capsule.rerun import configured, sampled
from fedfrozen_app.capsule.tampering import inner_problems
from fedfrozen_app.capsule.write import write_capsule
from fedfrozen_app.core.bundles import source_digest
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.strict import hash_of
from tests.conftest import SMALL

ROOT = Path(__file__).parents[2]
WORDS = [*SMALL, "num_rounds=2", "num_clients=2", "baseline=false"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A sweep of two methods and two seeds, as a capsule."""
    base = tmp_path_factory.mktemp("capsule")
    sweep = base / "sweep"
    assert command(["-m", *WORDS, "strategy=fedavg,fedfrozen", "seed=0,1", f"hydra.sweep.dir={sweep}"]) == 0
    words = ["--out", str(base / "paper.zip"), "--title", "Two methods", "--url", "https://example.org"]
    assert command(["capsule", str(sweep), *words]) == 0
    return base / "paper.zip"


def contents(path):
    with zipfile.ZipFile(path) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


def packed(files, path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in files.items():
            out.writestr(name, content)
    return path


def resealed(files, **changes):
    """As a forger would: every digest is right again."""
    record = json.loads(files["capsule.json"]) | changes
    record["files"] = {
        name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name != "capsule.json"
    }
    record["sha256"] = hash_of({key: value for key, value in record.items() if key != "sha256"})
    return {**files, "capsule.json": json.dumps(record).encode()}


def test_it_holds_what_others_need_and_no_path_of_this_machine(made):
    files = contents(made)
    record = json.loads(files["capsule.json"])
    assert sorted(record["cells"]) == ["0", "1", "2", "3"]
    assert {
        f"runs/{n}/{name}" for n in range(4) for name in ("metrics.jsonl", "summary.json")
    } <= files.keys()
    assert record["code"]["sources"] == source_digest(ROOT)
    assert b"torch==" in files["requirements.txt"] and b"\nfedfrozen==" not in files["requirements.txt"]
    cell = record["cells"]["0"]
    assert set(cell["splits"]["clients"]) == {"0", "1"} and cell["test_rows"] == 160
    groups = record["claims"]["groups"]
    assert [group["label"] for group in groups] == ["fedavg", "fedfrozen"]
    assert all(group["mean_low"] <= group["mean"] <= group["mean_high"] for group in groups)
    text = b"".join(content for name, content in files.items() if not name.endswith(".whl"))
    assert str(made.parent).encode() not in text and str(ROOT).encode() not in text


def test_the_crate_describes_every_file(made, tmp_path):
    files = contents(made)
    graph = {one["@id"]: one for one in json.loads(files["ro-crate-metadata.json"])["@graph"]}
    parts = {one["@id"] for one in graph["./"]["hasPart"]}
    assert parts == files.keys() - {"ro-crate-metadata.json"} and parts <= graph.keys()
    assert graph["ro-crate-metadata.json"]["conformsTo"]["@id"].endswith("/ro/crate/1.1")
    assert {"name", "description", "datePublished", "license", "author"} <= graph["./"].keys()


def test_all_cells_have_the_same_bits_here(made, tmp_path, capsys):
    words = ["reproduce", str(made), "--out", str(tmp_path / "out")]
    assert command(words) == 0
    shown = capsys.readouterr().out
    assert shown.count("same bits") == 4 and "4 cells run again, all hold" in shown
    assert "The environment is the capsule's" in shown
    # Given again, it keeps what it ran; a result outside of its interval does not hold.
    summary = tmp_path / "out" / "runs" / "0" / "summary.json"
    found = json.loads(summary.read_text())
    found["final_test_accuracy"] = 0.999
    (tmp_path / "out" / "runs" / "0" / "manifest.jsonl").unlink()
    (tmp_path / "out" / "runs" / "0" / "metrics.jsonl").write_text("")
    summary.write_text(json.dumps(found))
    assert command([*words, "--digest", json.loads(contents(made)["capsule.json"])["sha256"]]) == 1
    assert "0: outside, 0.9990 (stated" in capsys.readouterr().out


CHANGES = {
    "a changed byte": "runs/1/metrics.jsonl has other bytes than were written",
    "a missing file": "runs/2/summary.json is missing",
    "an added file": "runs/0/extra.json was added",
    "two files swapped": "runs/0/metrics.jsonl has other bytes than were written",
    "the list of digests": "capsule.json is not as it was written",
    "the table": "the table's groups[0].mean is stated as 0.99, and its raw rows give",
    "a result, all digests right": "runs/0: the final result does not follow from its raw rows",
    "the code, all digests right": "is not the code of the stated bundle hash",
    "the wrong capsule": "and you expect ",
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_named(kind, made, tmp_path, capsys):
    files, more = contents(made), []
    if kind == "a changed byte":
        files["runs/1/metrics.jsonl"] = files["runs/1/metrics.jsonl"].replace(b"1", b"2", 1)
    elif kind == "a missing file":
        del files["runs/2/summary.json"]
    elif kind == "an added file":
        files["runs/0/extra.json"] = b"{}"
    elif kind == "two files swapped":
        one, other = "runs/0/metrics.jsonl", "runs/1/metrics.jsonl"
        files[one], files[other] = files[other], files[one]
    elif kind == "the list of digests":
        record = json.loads(files["capsule.json"])
        record["machine"]["cores"] = 4096
        files["capsule.json"] = json.dumps(record).encode()
    elif kind == "the table":
        record = json.loads(files["capsule.json"])
        record["claims"]["groups"][0]["mean"] = 0.99
        files = resealed(files, claims=record["claims"])
    elif kind == "a result, all digests right":
        summary = json.loads(files["runs/0/summary.json"])
        summary["final_test_accuracy"] = 0.99
        files = resealed({**files, "runs/0/summary.json": json.dumps(summary).encode()})
    elif kind == "the code, all digests right":
        name = next(name for name in files if name.endswith(".whl"))
        wheel = packed({name: files[name]}, tmp_path / "w.zip").with_suffix(".whl")
        wheel.write_bytes(files[name])
        inside = contents(wheel)
        inside["fedfrozen_app/__init__.py"] += b"\n# evil\n"
        files = resealed({**files, name: packed(inside, wheel).read_bytes()})
    else:
        more = ["--digest", "0" * 64]
    changed = packed(files, tmp_path / "changed.zip")
    assert command(["reproduce", str(changed), "--cells", "0", "--out", str(tmp_path / "out"), *more]) == 1
    shown = capsys.readouterr().out
    assert f"changed: {CHANGES[kind]}" in shown or (CHANGES[kind] in shown and "changed: " in shown)
    assert "nothing was run" in shown


def refused(path, tmp_path, capsys):
    capsys.readouterr()
    assert command(["reproduce", str(path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


def test_a_hostile_file_is_data_and_nothing_else(made, tmp_path, capsys):
    files = contents(made)
    for name in ("../evil", "/etc/evil", "runs\\evil", "a/../../evil", ".hidden", "runs//x", "C:evil"):
        bad = packed({**files, name: b"x"}, tmp_path / "bad.zip")
        assert "has no plain name" in refused(bad, tmp_path, capsys), name
    assert not list(tmp_path.parent.glob("evil"))
    bomb = packed({**files, "runs/0/bomb.json": b"0" * 300_000_000}, tmp_path / "bomb.zip")
    assert "bomb.json unpacks to 300,000,000 bytes" in refused(bomb, tmp_path, capsys)
    link = zipfile.ZipInfo("runs/0/link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(packed(files, tmp_path / "link.zip"), "a") as out:
        out.writestr(link, "/etc/passwd")
    assert "link is no plain file" in refused(tmp_path / "link.zip", tmp_path, capsys)
    with pytest.warns(UserWarning), zipfile.ZipFile(packed(files, tmp_path / "twice.zip"), "a") as out:
        out.writestr("capsule.json", "{}")
    assert "it holds capsule.json twice" in refused(tmp_path / "twice.zip", tmp_path, capsys)
    (tmp_path / "cut.zip").write_bytes(made.read_bytes()[:-200])
    assert "is no whole capsule" in refused(tmp_path / "cut.zip", tmp_path, capsys)
    other = packed({"x": b"1"}, tmp_path / "other.zip")
    assert "it has no capsule.json" in refused(other, tmp_path, capsys)
    for text in (b'{"format": 1', b'{"format": 1, "format": 1}', b"[" * 100_000, b'{"format": NaN}', b"[]"):
        bad = packed({**files, "capsule.json": text}, tmp_path / "bad.zip")
        assert "capsule.json cannot be read" in refused(bad, tmp_path, capsys)


def test_settings_are_plain_values(made, tmp_path, capsys):
    """An interpolation, a group outside of conf/, a database: refused before anything runs."""
    files = contents(made)
    for change, expected in (
        ({"command": "fedfrozen dataset=../../evil"}, "names no file of conf/"),
        ({"config": {"dataset": {"path": "${oc.env:HOME}"}}}, "has ${...} in dataset.path"),
        ({"config": {"dataset": {"kind": "hub", "path": "some/data"}}}, "--trust-folder"),
    ):
        summary = json.loads(files["runs/0/summary.json"])
        summary["command"] = change.get("command", summary["command"])
        if "config" in change:
            summary["config"]["dataset"] |= change["config"]["dataset"]
        record = json.loads(files["capsule.json"])
        record["cells"] = {"0": record["cells"]["0"] | {"configuration": hash_of(summary["config"])}}
        own = {
            name: content
            for name, content in files.items()
            if name[:7] not in ("runs/1/", "runs/2/", "runs/3/")
        }
        own |= {"runs/0/summary.json": json.dumps(summary).encode()}
        bad = packed(resealed(own, cells=record["cells"]), tmp_path / "bad.zip")
        found = open_capsule(bad, tmp_path / "opened")
        assert not found.problems
        with pytest.raises(UserError) as told:
            configured(found, "0", {}, tmp_path / "run", trusted=False)
        assert expected in str(told.value)


def test_a_sample_is_drawn_by_the_digest(made, tmp_path):
    found = open_capsule(made, tmp_path / "opened")
    assert sampled(found, None) == ["0", "1", "2", "3"] == sampled(found, 9)
    drawn = [sampled(found, n) for n in range(5)]
    assert [len(each) for each in drawn] == [0, 1, 2, 3, 4]
    assert all(set(one) <= set(other) for one, other in pairwise(drawn))
    found.record["sha256"] = "f" * 64
    assert any(sampled(found, n) != drawn[n] for n in (1, 2, 3))


def test_data_are_asked_for_by_digest(tmp_path, capsys):
    data = tmp_path / "notes.csv"
    data.write_text("text,label\n" + "".join(f"word{n % 7} other {n},{n % 2}\n" for n in range(120)))
    run, out = tmp_path / "run", tmp_path / "one.zip"
    words = ["dataset=text", f"dataset.path={data}", "dataset.text_column=text", "dataset.label_column=label"]
    small = ["num_clients=2", "num_rounds=1", "baseline=false", "client.local_epochs=1", "partition=iid"]
    size = ["model.config.hidden_size=16", "model.config.intermediate_size=16", "runtime.threads=1"]
    assert command([*words, *small, *size, f"output_dir={run}"]) == 0
    assert command(["capsule", str(run), "--out", str(out)]) == 0
    text = b"".join(content for name, content in contents(out).items() if not name.endswith(".whl"))
    assert str(tmp_path).encode() not in text
    assert "The cells read notes.csv (1 file, SHA-256" in refused(out, tmp_path, capsys)
    moved = tmp_path / "elsewhere.csv"
    shutil.copy(data, moved)
    again_words = ["reproduce", str(out), "--out", str(tmp_path / "out"), "--data"]
    assert command([*again_words, str(moved)]) == 0
    assert "run: same bits" in capsys.readouterr().out
    data.write_text(data.read_text().replace("word3", "word4", 1))
    assert command([*again_words, str(data)]) == 1
    assert "are not those of the capsule: it has other bytes" in capsys.readouterr().out


def test_what_cannot_be_packed_is_refused(made, tmp_path, capsys):
    out = str(tmp_path / "x.zip")
    assert command(["capsule", str(tmp_path / "none"), "--out", out]) == 2
    assert command(["capsule", str(tmp_path), "--out", out]) == 2
    assert "no finished run" in capsys.readouterr().err
    assert command(["capsule", str(made.parent / "sweep"), "--out", str(made)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_interval_of_one_cell_that_is_run_again():
    """By hand: Student's prediction interval; Wilson's for one seed."""
    found = again([0.5, 0.6, 0.7], (0.0, 1.0), 100)
    assert found["low"] == pytest.approx(0.6 - 4.30265273 * 0.1 * (4 / 3) ** 0.5)
    assert found["high"] == 1.0  # cut at the end of the range
    one = again([0.8], (0.0, 1.0), 100)
    assert (one["low"], one["high"]) == (pytest.approx(0.71117, abs=1e-5), pytest.approx(0.86663, abs=1e-5))
    assert again([3.0], (0.0, float("inf")), 100) is None


def test_places_are_known_by_their_files(tmp_path):
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / "a.csv").write_text("1")
    (tmp_path / "d" / "sub" / "b.csv").write_text("2")
    one = Place("d", files_of(tmp_path / "d"))
    assert set(one.files) == {"a.csv", "sub/b.csv"}
    for change, expected in (("c.csv", "c.csv was added"), ("a.csv", "a.csv has other bytes")):
        (tmp_path / "d" / change).write_text("3")
        assert one.differs(Place("d", files_of(tmp_path / "d"))).startswith(expected)
    (tmp_path / "d" / "a.csv").unlink()
    assert one.differs(Place("d", files_of(tmp_path / "d"))) == "a.csv is missing"
    assert portable_words(["seed=1", "dataset.path='/x/d e'", "output_dir=/y"], {"/x/d e": "data/d"}) == [
        "seed=1",
        "dataset.path='data/d'",
    ]


def test_a_lock_can_be_installed_from_any_index_and_names_the_exact_build(monkeypatch):
    """No public index has torch 2.13.0+cpu: pip would refuse the whole file."""
    monkeypatch.setattr(environment, "lock", lambda: ["numpy==2.4.6", "torch==2.13.0+cpu"])
    text = environment.lock_text()
    assert text == "numpy==2.4.6\ntorch==2.13.0  # built as 2.13.0+cpu\n"
    read = [Requirement(line.partition(" #")[0]) for line in text.splitlines()]
    assert "2.13.0+cpu" in read[1].specifier and "2.13.0" in read[1].specifier
    assert environment.lock_differences(text) == []
    monkeypatch.setattr(environment, "lock", lambda: ["torch==2.13.0"])
    assert environment.lock_differences(text) == [
        "numpy 2.4.6 (here not installed)",
        "torch 2.13.0+cpu (here 2.13.0)",
    ]


def test_the_wheel_has_the_digest_of_its_sources(made, tmp_path):
    files = contents(made)
    name = next(name for name in files if name.endswith(".whl"))
    (tmp_path / name).write_bytes(files[name])
    assert sources_of_wheel(tmp_path / name) == source_digest(ROOT)


@pytest.mark.slow
def test_the_validator_of_ro_crates_finds_nothing(made, tmp_path):
    """RO-Crate's context comes from its cache, which `rocrate-validator cache warm` fills over a network."""
    pytest.importorskip("rocrate_validator", reason="roc-validator is not installed")
    folder = tmp_path / "crate"
    with zipfile.ZipFile(made) as whole:
        whole.extractall(folder)
    words = ["validate", "--offline", "-p", "ro-crate-1.1", "-l", "recommended", "--no-paging", str(folder)]
    code = "from rocrate_validator.cli import cli; cli()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    if "HTTP cache" in done.stdout + done.stderr:
        pytest.skip("roc-validator has no context of RO-Crate: rocrate-validator cache warm")
    assert done.returncode == 0, done.stdout


def test_settings_of_several_keys_are_one_table_for_writer_and_reader(tmp_path):
    """Labels and rows follow the settings' order, which a packed summary does not keep."""
    sweep = tmp_path / "sweep"
    for name, words in {
        "one": ["client.lr=0.01", "client.local_epochs=1"],
        "two": ["partition.alpha=1"],
    }.items():
        assert command([*WORDS, "num_rounds=1", *words, f"output_dir={sweep / name}"]) == 0
    digest = write_capsule(sweep, tmp_path / "paper.zip", About("Two", "Somebody", "MIT", "2026-01-01"))
    opened = open_capsule(tmp_path / "paper.zip", tmp_path / "opened", digest)
    assert opened.problems == [] and inner_problems(opened) == []
