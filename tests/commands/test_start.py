"""What a command line says before it trains: order of words, mistakes in data, keys without effect."""

import sys

import pytest

from fedfrozen_app.commands import VERBS, dispatch, start
from fedfrozen_app.config import compose_config
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.data.sources import DatasetSpec
from fedfrozen_app.data.sources.load import prepare, read_ahead
from fedfrozen_app.sweep.multirun import multirun


def test_settings_and_options_come_in_any_order():
    words = ["dataset=text", "--column", "age=0,18", "output_dir=there", "--floor", "5", "num_clients=3"]
    given = parse("census", words)
    assert given.overrides == ["dataset=text", "output_dir=there", "num_clients=3"]
    assert (given.column, given.floor) == (["age=0,18"], 5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["census", "--column", "age"], r"age has no values: write age=0,18"),
        (["census", "--flor", "5"], "--flor"),
        (["compare", "a", "--target", "much"], "much"),
    ],
)
def test_a_mistake_in_an_option_is_told_before_its_verb_is_imported(monkeypatch, words, said):
    monkeypatch.setitem(VERBS, words[0], "fedfrozen_app.no_such_module:verb")  # importing it would fail
    with pytest.raises(UserError, match=said):
        dispatch(words)


@pytest.mark.parametrize(("words", "said"), [(["show", "3f9a"], "is no site's kit"), (["show"], "hash")])
def test_a_folder_that_is_no_kit_is_told_before_a_site_s_verb_is_imported(monkeypatch, tmp_path, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "fedfrozen_app.sites.approval_verbs", None)  # importing it would fail
    with pytest.raises(UserError, match=said):
        dispatch(["site", *words])


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--cfg=job"], ["--info"]])
def test_a_flag_that_shows_one_run_is_not_for_a_sweep(flags):
    with pytest.raises(UserError, match=r"shows the configuration of one run.*leave -m out"):
        start.train(["-m", *flags, "seed=0,1"])


def test_a_path_with_spaces_is_read_and_one_with_brackets_is_told_how(tmp_path):
    plain = f"dataset.path={tmp_path}/my data/notes.csv"
    assert compose_config(["dataset=text", plain]).dataset.path == f"{tmp_path}/my data/notes.csv"
    with pytest.raises(UserError) as refused:
        compose_config(["dataset=text", "dataset.path=/data/notes (1), new.csv"])
    said = "\"dataset.path='/data/notes (1), new.csv'\""
    assert said in str(refused.value)
    assert compose_config(["dataset=text", said.strip('"')]).dataset.path == "/data/notes (1), new.csv"


def test_a_mistake_in_the_data_is_told_before_training_is_imported(tmp_path, monkeypatch):
    table = tmp_path / "notes.csv"
    table.write_text("text,label\nfever,ill\nfever, high,ill\n")
    monkeypatch.setitem(sys.modules, "fedfrozen_app.commands.training", None)  # importing it would fail
    with pytest.raises(UserError, match="do not have the 2 cells of the header"):
        start.train(["dataset=text", f"dataset.path={table}", f"output_dir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["privacy.epsilon=8"], "privacy=none ignores privacy.epsilon"),
        (["dataset=text", "dataset.path=nowhere.csv"], "nowhere.csv does not exist"),
    ],
)
def test_what_needs_no_strategy_is_told_before_one_is_imported(monkeypatch, words, said):
    monkeypatch.setitem(sys.modules, "strategies.fedfrozen", None)  # importing it would fail
    monkeypatch.setitem(sys.modules, "strategies.fedavg", None)
    with pytest.raises(UserError, match=said):
        start.train(words)


def test_a_mistake_in_a_table_is_told_before_training_is_imported(tmp_path, monkeypatch):
    table = tmp_path / "patients.csv"
    table.write_text('age,ill\n61,yes\n6"2,no,9\n')
    monkeypatch.setitem(sys.modules, "fedfrozen_app.commands.training", None)  # importing it would fail
    with pytest.raises(UserError, match=r"patients\.csv"):
        start.train(["dataset=table", f"dataset.path={table}", "dataset.label_column=ill"])


def test_rows_read_ahead_are_not_read_again(tmp_path):
    table = tmp_path / "notes.csv"
    table.write_text("text,label\n" + "fever,ill\nnone,well\n" * 5)
    spec = DatasetSpec(name="x", kind="text", path=str(table))
    read_ahead(spec)
    table.unlink()
    assert len(prepare(spec).train.content) == 8
    with pytest.raises(UserError, match="does not exist"):  # and they are not kept
        prepare(spec)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["privacy.epsilon=4,8"], "privacy=none ignores privacy.epsilon"),
        (["privacy=dp_sgd,none", "privacy.epsilon=8"], "privacy=none ignores privacy.epsilon"),
        (["seed=0,1", "adapter.rank=4"], "adapter=none ignores adapter.rank"),
    ],
)
def test_a_sweep_over_a_key_without_effect_is_refused_before_its_first_run(tmp_path, words, said):
    with pytest.raises(UserError, match=said):
        multirun(["-m", *words, f"output_dir={tmp_path / 'sweep'}"])
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["privacy.epsilon=8"],
        ["adapter.rank=4"],
        ["secure_aggregation.min_cohort=5"],
        ["experiment=digits_few", "privacy.epsilon=8"],
    ],
)
def test_a_run_with_a_key_without_effect_is_refused(words):
    with pytest.raises(UserError, match=f"ignores {words[-1].partition('=')[0]}"):
        start.prepare(words)
