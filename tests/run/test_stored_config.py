"""A run folder is data: what it names beyond local files is asked for, and none of it is a program."""

import json
import shlex
import shutil
import sqlite3
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.config import compose_run
from fedfrozen_app.config.differences import partition_differences
from fedfrozen_app.config.schema import sections
from fedfrozen_app.config.settings import KEY
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files.seal import sealed, unsealed
from fedfrozen_app.run.outside import PATHS, known_sources, outside, remember
from fedfrozen_app.run.stored_config import as_it_was, plain_overrides, stored_config
from tests.conftest import SMALL

QUERY = "SELECT person_id, label, text FROM note"
TEXT = [
    *(word for word in SMALL if not word.startswith("dataset.limit")),
    *("dataset=text", "strategy=fedavg", "model=bert_tiny", "partition=iid", "num_rounds=1", "num_clients=2"),
]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Of an account that has used nothing yet."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one's own on a CSV file, which others may have changed since."""
    folder = tmp_path_factory.mktemp("own")
    rows = [(n, "ab"[n % 2], f"note {n}") for n in range(80)]
    (folder / "notes.csv").write_text("text,label\n" + "".join(f"{t},{label}\n" for _, label, t in rows))
    with sqlite3.connect(folder / "clinic.db") as database:
        database.execute("CREATE TABLE note(person_id int, label text, text text)")
        database.executemany("INSERT INTO note VALUES (?, ?, ?)", rows)
    database.close()
    assert command([*TEXT, f"dataset.path={folder}/notes.csv", f"output_dir={folder}/run"]) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"


def doctor(run: Path, words: list[str], **dataset: str) -> None:
    """What whoever passes a folder on can write into it, and leave out of it."""
    (run / "manifest.jsonl").unlink(missing_ok=True)
    summary = json.loads((run / "summary.json").read_text())
    summary["command"] = shlex.join(["fedfrozen", *shlex.split(summary["command"])[1:], *words])
    summary["config"]["dataset"] |= dataset
    (run / "summary.json").write_text(json.dumps(summary))
    for place in run.glob("checkpoints/*/state.json"):
        state = unsealed(place)
        state["overrides"] += words
        state["config"]["dataset"] |= dataset
        others = sorted(path for path in place.parent.iterdir() if path != place)
        place.write_text(sealed(state, *others))


def with_query(run: Path, finished: Path) -> list[str]:
    path = str(finished / "clinic.db")
    words = ["dataset.kind=omop", f"dataset.path='{path}'", f"++dataset.query='{QUERY}'"]
    doctor(run, words, kind="omop", path=path, query=QUERY)
    return words


@pytest.fixture
def asked(monkeypatch):
    """Addresses of the databases that were opened."""
    import sqlalchemy

    found: list[str] = []
    real = sqlalchemy.create_engine
    monkeypatch.setattr(
        sqlalchemy, "create_engine", lambda address, *more: (found.append(str(address)), real(address))[1]
    )
    return found


def said(capsys) -> str:
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "rest"),
    [
        ("evaluate", []),
        ("export", ["DIR"]),  # a folder beside the run
        ("fairness", ["--bootstrap", "2"]),
        ("audit", []),
        ("baselines", []),
        ("resume", ["num_rounds=2"]),
    ],
)
def test_no_verb_runs_a_query_that_only_the_folder_names(run, finished, asked, capsys, verb, rest):
    with_query(run, finished)
    capsys.readouterr()
    assert command([verb, str(run), *(word.replace("DIR", f"{run}-exported") for word in rest)]) == 2
    sentence = said(capsys)
    assert "by a query of its own" in sentence and "--trust-folder" in sentence and not asked
    assert sentence.count("\n") == 1


def test_whoever_trusts_the_folder_or_names_the_query_gets_it(run, finished, asked, capsys):
    words = with_query(run, finished)
    assert command(["evaluate", str(run), "--trust-folder"]) == 0 and len(asked) == 1
    assert json.loads(capsys.readouterr().out)["run"] == str(run)
    assert command(["evaluate", str(run), *words]) == 0 and len(asked) == 2
    assert (
        command(["evaluate", str(run), words[1]]) == 2 and len(asked) == 2
    )  # the query is still the folder's
    csv = ["dataset.kind=text", "dataset.path=" + str(finished / "notes.csv"), "dataset.query=null"]
    assert command(["evaluate", str(run), *csv]) == 0 and len(asked) == 2


def test_one_s_own_folders_ask_nothing(run, finished, asked, tmp_path):
    assert command(["evaluate", str(run)]) == 0  # a CSV file
    assert not known_sources().exists()
    own = tmp_path / "own"
    words = [word.replace("dataset=text", "dataset=omop") for word in TEXT]
    words += [f"dataset.path={finished}/clinic.db", f"dataset.query='{QUERY}'", f"output_dir={own}"]
    assert command(words) == 0
    assert command(["evaluate", str(own)]) == 0 and len(asked) == 2  # the very query that was run here
    assert known_sources().stat().st_mode & 0o077 == 0
    doctor(own, ["dataset.query='SELECT 1'"], query="SELECT 1")
    assert command(["evaluate", str(own)]) == 2 and len(asked) == 2


def test_resolvers_of_a_folder_are_not_resolved(run, capsys):
    doctor(run, ["dataset.name=${oc.env:SECRET_TOKEN}"])
    assert command(["evaluate", str(run)]) == 0  # the value that the run recorded counts
    told = capsys.readouterr()
    assert "hunter2" not in told.out + told.err
    doctor(run, [], name="${oc.env:SECRET_TOKEN}")
    assert command(["evaluate", str(run)]) == 2
    told = said(capsys)
    assert "has ${...} in dataset.name" in told and "hunter2" not in told


def test_listing_resolves_nothing_either(run, capsys):
    (run / "summary.json").unlink()
    (run / "manifest.jsonl").unlink()
    status = unsealed(run / "status.json")
    status["overrides"].append("dataset.name=${oc.env:SECRET_TOKEN}")
    (run / "status.json").write_text(sealed(status))
    assert command(["show", str(run)]) == 0
    assert "hunter2" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "word",
    ["dataset=../../../tmp/evil", "model=/tmp/evil", "dataset@model=digits", "a/b=c", "strategy='../x'"],
)
def test_a_folder_names_no_file_outside_of_conf(word):
    with pytest.raises(UserError, match="names no file of conf/"):
        plain_overrides(Path("RUN"), [word], {})


def test_only_plain_overrides_stay():
    had = {"dataset": {"name": "mine", "path": "/data"}, "seed": 3}
    words = [
        *("strategy=fedavg", "dataset.name='${oc.env:X}'", "seed=1,2", "dataset.path=${oc.env:HOME}/x"),
        *("hydra.run.dir=/tmp/x", "+hydra.searchpath=[file:///tmp]", "hydra/launcher=evil", "num_rounds=3"),
        "client.lr=${oc.env:LR}",
    ]
    assert plain_overrides(Path("RUN"), words, had) == [
        "strategy=fedavg", "++dataset.name='mine'", "++seed=3", "++dataset.path='/data'", "num_rounds=3",
    ]  # fmt: skip


@pytest.mark.parametrize("overrides", [["a=b=[c"], [3], ["\x1b[31m="]])
def test_overrides_that_are_none_are_one_sentence(overrides):
    with pytest.raises(UserError, match=r"^The overrides of RUN (cannot be read|are no texts)") as found:
        plain_overrides(Path("RUN"), overrides, {})
    assert "\x1b" not in str(found.value)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["dataset=hub", "dataset.path=a/b"], "downloads the data set a/b"),
        (["model=hub", "model.path=a/b"], "downloads the model a/b"),
        (["dataset.kind=others"], "reads data by others, which an installed package brings"),
        (["model.source=others"], "builds its model by others"),
        (
            ["+model.config.attn_implementation=some/code"],
            "settings attn_implementation, which may name code",
        ),
        (["dataset=text", "dataset.path=/dev/stdin"], "opens /dev/stdin, which is no plain file"),
        (["adapter=lora", "adapter.path=some/adapter"], "opens some/adapter"),
        (["runtime=deployed", "runtime.server_kit=kit"], "connects to the server of the kit"),
        (["runtime=ray", "runtime.address=10.0.0.9:6379"], "trains on the Ray cluster at 10.0.0.9:6379"),
        (["track.wandb=true"], "sends its metrics to wandb"),
        (["runtime.cache_dir=/tmp/x"], "writes into /tmp/x"),
    ],
)
def test_what_lies_outside_is_asked_for_until_a_run_has_used_it(words, what):
    resolved = compose_run(words).resolved
    found = outside(resolved, trains=True)
    assert [one.what for one in found if what in one.what]
    remember(resolved)
    lines = known_sources().read_text().split()
    remember(resolved)
    assert known_sources().read_text().split() == lines == [one.digest for one in found]


def test_a_folder_that_trains_on_is_asked_about_its_server_and_one_that_is_read_is_not():
    words = ["runtime=deployed", "runtime.server_kit=kit"]
    had = compose_run(words).resolved
    assert stored_config(Path("RUN"), words, had).resolved == had
    with pytest.raises(UserError, match="RUN connects to the server of the kit kit, which no run"):
        stored_config(Path("RUN"), words, had, trains=True)


# Every key that takes any text: either it names something (outside.py looks at it) or it is just a word.
NAMES_SOMETHING = {
    *PATHS,
    *("dataset.kind", "dataset.query", "model.source", "runtime.server_kit"),
    *("runtime.address", "runtime.cache_dir", "track.project"),
}
A_WORD = {
    *("dataset.name", "dataset.task", "dataset.train_split", "dataset.test_split", "dataset.image_column"),
    *("dataset.text_column", "dataset.label_column", "dataset.prompt_column", "dataset.answer_column"),
    *("dataset.time_column", "dataset.event_column"),
    *("dataset.separator", "dataset.unit_column", "model.name", "model.model_type", "model.dtype"),
    *("adapter.layers", "adapter.rule", "adapter.name", "codec.name", "codec.down", "partition.column"),
    *("checkpoint.uploads", "runtime.view", "runtime.stack_runs", "privacy.audited", "privacy.unit_column"),
}


def test_whoever_adds_a_key_of_free_text_says_whether_it_names_something():
    texts = {
        f"{name}.{one.name}"
        for name, kind in sections().items()
        for one in fields(kind)
        if "str" in str(get_type_hints(kind)[one.name])
        and "list" not in str(get_type_hints(kind)[one.name])
        and "dict" not in str(get_type_hints(kind)[one.name])
        and not one.metadata[KEY].choices
    }
    assert texts == NAMES_SOMETHING | A_WORD


def test_a_run_of_an_older_version_keeps_what_it_did_before_a_key_was_there() -> None:
    words = ["dataset=conll", "dataset.path=.", "strategy=fedavg"]
    had = compose_run(words, recorded=True).resolved
    assert as_it_was(words, had).config.dataset.unmarked == "sentences"
    older = had | {"dataset": {key: value for key, value in had["dataset"].items() if key != "unmarked"}}
    assert as_it_was(words, older).config.dataset.unmarked == "files"
    assert as_it_was(words, older, ["dataset.unmarked=sentences"]).config.dataset.unmarked == "sentences"
    assert partition_differences(had, older) == ["dataset"]
    pictures = compose_run(["strategy=fedavg"], recorded=True).resolved
    del pictures["dataset"]["unmarked"]
    assert as_it_was(["strategy=fedavg"], pictures).overrides == ["strategy=fedavg"]
