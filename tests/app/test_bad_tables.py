"""Bad rows of a hospital table: the command ends with one sentence and exit code 2, and no file changes.

What is no error says so in a line: a level never seen. A site with one class trains as the others do.
"""

import json

import numpy as np
import pytest
from PIL import Image

from fedfrozen_app.__main__ import run as command
from tests.conftest import Run, slowly
from tests.data.masked import draw

HEAD = "age,sex,ill,days,died,site"
GOOD = [f"{50 + n % 7}.5,{'fm'[n % 2]},{n % 3 % 2},{n + 1},{n % 5 % 2},{'ab'[n % 2]}" for n in range(40)]
ILL = ("dataset.label_column=ill", "dataset.columns=[age,sex]")
DAYS = ("dataset.task=survival", "dataset.time_column=days", "dataset.event_column=died")
DAYS += ("dataset.columns=[age,sex]",)


def changed(column, value, rows=range(40)):
    """The good rows with this value in that column of some."""
    place, lines = HEAD.split(",").index(column), [line.split(",") for line in GOOD]
    for row in rows:
        lines[row][place] = value
    return [HEAD, *(",".join(line) for line in lines)]


def without(column):
    place = HEAD.split(",").index(column)
    lines = [line.split(",") for line in (HEAD, *GOOD)]
    return [",".join(line[:place] + line[place + 1 :]) for line in lines]


def written(tmp_path, **tables):
    """One file, or a folder with a file for each site."""
    folder = tmp_path / "tables"
    folder.mkdir()
    for name, lines in tables.items():
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder if len(tables) > 1 else folder / f"{name}.csv"


def words(path, *more):
    return [
        *("strategy=fedavg", "dataset=table", f"dataset.path={path}", "model=linear", "num_rounds=1"),
        *("num_clients=2", "partition.min_size=1", "runtime.threads=1", "track.tensorboard=false"),
        *("baseline=false", f"output_dir={path.parent}/run", *more),
    ]


def sentence(capsys):
    """The only line that the command wrote to stderr."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    return line


NO_EVENT = "is 1 the event, and 0 a person who was followed up without one?"


@pytest.mark.parametrize(
    ("tables", "task", "expected"),
    [
        (
            {"aachen": [HEAD, *GOOD], "basel": without("age")},
            ILL,
            "fedfrozen: basel.csv lacks the column 'age', which the model is to read: add it, or name the "
            "columns that all files have in dataset.columns.",
        ),
        (
            {"p": changed("age", "old", [20])},
            ILL,
            "fedfrozen: 'old' in line 22 of p.csv is no number, and column 'age' needs one: correct "
            "the cell.",
        ),
        (
            {"p": [HEAD, *(f",?,{line.split(',', 2)[2]}" for line in GOOD)]},
            ILL,
            "fedfrozen: None of the 40 rows of 'train' has a value in any column that the model reads "
            "(age, sex): name other columns in dataset.columns.",
        ),
        (
            {"p": changed("days", "-3", [20])},
            DAYS,
            "fedfrozen: The time in line 22 of p.csv is -3, below 0: times in 'days' count from a "
            "person's own start.",
        ),
        (
            {"p": changed("died", "0")},
            DAYS,
            f"fedfrozen: No train row has an event in column 'died': there is nothing to learn; {NO_EVENT}",
        ),
    ],
    ids=["lacks a column", "text", "all missing", "negative time", "no event"],
)
def test_a_run_ends_with_one_sentence(tmp_path, capsys, tables, task, expected):
    path = written(tmp_path, **tables)
    before = {file: file.read_bytes() for file in sorted((tmp_path / "tables").iterdir())}
    assert command(words(path, *task)) == 2
    assert sentence(capsys) == expected
    assert {file: file.read_bytes() for file in before} == before
    assert not (path.parent / "run" / "summary.json").exists()


def test_a_mask_of_another_size_ends_with_one_sentence(tmp_path, capsys):
    folder = draw(tmp_path / "d", count=4)
    mask = folder / "masks" / "01_mask.png"
    Image.fromarray(np.zeros((16, 20), dtype=np.uint8)).save(mask)
    given = ["strategy=fedavg", "dataset=masks", f"dataset.path={folder}", "model=unet", "num_clients=2"]
    assert command([*given, f"output_dir={tmp_path}/run"]) == 2
    assert sentence(capsys) == (
        f"fedfrozen: The mask {mask} has 20x16 pixels, and its picture {folder}/images/01.png 16x16: they "
        "must be of one size."
    )


STUDY = {
    "negative time": (
        changed("days", "-3", [20]),
        "fedfrozen: The column days holds -3: no one is followed for a time below 0. Mend the rows, or leave "
        "them out.",
    ),
    "no event": (
        changed("died", "0"),
        "fedfrozen: No one has the event: the column died is 0 in all rows that count, so that no curve ever "
        "falls. Is it the right column?",
    ),
    "text": (
        changed("age", "old", [20]),
        "fedfrozen: The column age holds 'old', which is no number: encode it as numbers.",
    ),
    "lacks a column": (without("age"), "fedfrozen: There is no column age: the rows have "),
}


@pytest.mark.parametrize("case", [*slowly("text", "lacks a column"), "negative time", "no event"])
def test_a_survival_study_ends_with_one_sentence(tmp_path, capsys, case):
    lines, expected = STUDY[case]
    path = written(tmp_path, p=lines)
    asked = ["--time", "days", "--event", "died", "--covariates", "age", "--site", "site", "--floor", "1"]
    assert command(["survival", str(path), *asked, f"output_dir={tmp_path}/study"]) == 2
    assert sentence(capsys).startswith(expected)


def test_a_level_never_seen_is_said_and_read_as_missing(tmp_path, caplog):
    lines = [f"{HEAD},split", *(f"{line},train" for line in GOOD), "50,x,1,3,1,a,test", "51,f,0,3,1,a,test"]
    path = written(tmp_path, p=lines)
    assert command(words(path, *ILL)) == 0
    warning = "1 row has a level of 'sex' that no train row has ('x'; line 42 of p.csv): it is read as a "
    warning += "missing one."
    assert warning in caplog.text
    assert warning in json.loads((path.parent / "run" / "data.json").read_text())["warnings"]


@pytest.mark.slow
def test_a_site_with_one_class_trains_and_is_compared_as_the_others_are(tmp_path):
    """Of site a everybody is ill."""
    path = written(tmp_path, p=changed("ill", "1", range(0, 40, 2)))
    given = words(path, *ILL, "partition=natural", "partition.column=site", "num_clients=null")
    assert command(given) == 0
    run = Run(path.parent / "run")
    assert run.rows[-1]["clients_ok"] == 2 and np.isfinite(run.rows[-1]["test_loss"])
    assert command(["baselines", str(run.folder)]) == 0
    found = json.loads((run.folder / "baselines.json").read_text())["baselines"]
    alone = next(one for one in found if one["name"].startswith("histogram") and "by_client" in one)
    share = run.summary["majority_accuracy"]
    assert set(alone["by_client"]) == {"a", "b"}
    assert alone["by_client"]["a"]["accuracy"] == pytest.approx(share)  # it can only say: ill
