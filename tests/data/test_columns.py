"""Tables of columns: what is inferred, how cells become numbers, and one sentence for what cannot be read."""

import json
import sqlite3

import numpy as np
import pandas as pd
import pytest
import torch

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.preprocessing import preprocessing_from, preprocessing_of, rescaled
from fedfrozen_app.data.sources import DatasetSpec, load

ROWS = [
    "age,sex,dose,site,ill",
    "60,m,1.5,a,yes",
    "50,f,,a,no",
    "40,m,2.5,b,yes",
    "70,f,NA,b,no",
    "55,,3.5,b,yes",
    "65,f,0.5,a,no",
]


def written(tmp_path, rows=ROWS, name="table.csv"):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def spec(path, **settings):
    given = {"label_column": "ill", "not_columns": ("site",), "test_fraction": 0.0} | settings
    return DatasetSpec(name="table", kind="table", path=str(path), **given)


def test_kinds_of_columns_are_inferred_and_cells_become_numbers(tmp_path):
    corpus = load(spec(written(tmp_path)))
    table = corpus.preprocessing
    assert [one.name for one in table.numeric] == ["age", "dose"]
    assert [(one.name, one.levels) for one in table.categorical] == [("sex", ("f", "m"))]
    age, dose = table.numeric
    assert (age.mean, age.median, age.indicator) == (pytest.approx(340 / 6), 57.5, False)
    assert (dose.mean, dose.median, dose.indicator) == (2.0, 2.0, True)
    assert dose.scale == pytest.approx(np.std([1.5, 2.5, 3.5, 0.5]))
    numbers, categories = corpus.train.inputs["numbers"], corpus.train.inputs["categories"]
    assert numbers.shape == (6, 3) and corpus.task == "table" and corpus.classes == ("no", "yes")
    torch.testing.assert_close(numbers[:, 0].std(unbiased=False), torch.tensor(1.0, dtype=torch.float64))
    assert numbers[1].tolist()[1:] == [
        0.0,
        1.0,
    ]  # a missing dose: the median, here the mean, and an indicator
    assert categories.flatten().tolist() == [1, 0, 1, 0, 2, 0]  # the missing one has a level of its own
    assert corpus.columns["site"].tolist() == ["a", "a", "b", "b", "b", "a"]


def test_the_same_rows_in_parquet_are_the_same(tmp_path):
    path = written(tmp_path)
    frame = pd.read_csv(path)
    frame.to_parquet(tmp_path / "table.parquet")
    one, other = load(spec(path)), load(spec(tmp_path / "table.parquet"))
    assert one.preprocessing == other.preprocessing
    assert torch.equal(one.train.inputs["numbers"], other.train.inputs["numbers"])
    assert torch.equal(one.train.inputs["categories"], other.train.inputs["categories"])


def test_rows_with_a_missing_value_can_be_left_out_and_are_counted(tmp_path):
    corpus = load(spec(written(tmp_path), missing="drop"))
    assert len(corpus.train) == 3
    assert corpus.account["splits"]["train"] == {"read": 6, "dropped": {"no content or no label": 3}}


def test_a_row_without_any_value_is_left_out(tmp_path):
    corpus = load(spec(written(tmp_path, [*ROWS, ",?,,a,no"])))
    assert len(corpus.train) == 6


def test_columns_are_chosen_and_numbers_can_be_categories(tmp_path):
    rows = ["stage,age,ill", "1,60,yes", "2,50,no", "10,40,yes"]
    corpus = load(spec(written(tmp_path, rows), columns=("stage",), categorical=("stage",)))
    assert corpus.preprocessing.columns == ("stage",)
    assert corpus.preprocessing.categorical[0].levels == ("1", "2", "10")


def test_each_file_is_a_site(tmp_path):
    for name in ("processed.cleveland", "processed.va"):
        written(tmp_path, ROWS, f"hearts/{name}.data")
    corpus = load(spec(tmp_path / "hearts"))
    assert set(corpus.columns["domain"]) == {"processed.cleveland", "processed.va"}
    assert corpus.preprocessing.columns == ("age", "dose", "sex")


def database(tmp_path, rows):
    place = tmp_path / "ward.sqlite"
    with sqlite3.connect(place) as connection:
        connection.execute("CREATE TABLE p (age REAL, sex TEXT, dose REAL, site TEXT, ill TEXT)")
        connection.executemany("INSERT INTO p VALUES (?, ?, ?, ?, ?)", rows)
    return place


def test_a_select_gives_the_same_rows(tmp_path):
    """OMOP's engine: a database that SQLAlchemy reaches, which is only read."""
    frame = pd.read_csv(written(tmp_path)).astype(object)
    place = database(tmp_path, frame.where(frame.notna(), None).values.tolist())
    one = load(spec(tmp_path / "table.csv"))
    other = load(spec(place, query="SELECT age, sex, dose, site, ill FROM p"))
    assert other.preprocessing == one.preprocessing and other.classes == one.classes
    for name, value in one.train.inputs.items():
        assert torch.equal(value, other.train.inputs[name])
    assert other.account["files"] == [
        {"file": "ward.sqlite", "rows": 6, "columns": ["age", "sex", "dose", "site", "ill"]}
    ]


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("SELECT age, ill FROM nobody", "could not be asked"),
        ("SELECT age, ill FROM p WHERE age > 99", "gives no rows"),
        ("SELECT age, age, ill FROM p", "'age' twice"),
        ("SELECT age FROM p", "names 'ill', which is no column: the data have age"),
    ],
)
def test_a_select_that_gives_no_table_is_one_sentence(tmp_path, query, sentence):
    place = database(tmp_path, [(60.0, "m", 1.5, "a", "yes"), (50.0, "f", 2.5, "a", "no")])
    with pytest.raises(UserError, match=sentence):
        load(spec(place, query=query))


def test_split_column(tmp_path):
    rows = ["age,ill,split", "1,a,train", "2,b,train", "3,a,test"]
    corpus = load(spec(written(tmp_path, rows)))
    assert (len(corpus.train), len(corpus.test)) == (2, 1)
    assert corpus.preprocessing.numeric[0].mean == 1.5  # of the train rows alone


def test_a_level_that_no_train_row_has_is_read_as_missing_and_reported(tmp_path):
    rows = ["sex,ill,split", "m,a,train", "f,b,train", "x,a,test"]
    corpus = load(spec(written(tmp_path, rows)))
    assert corpus.test.inputs["categories"].tolist() == [[2]]
    (warning,) = corpus.account["warnings"]
    assert "level of 'sex' that no train row has ('x'; line 4 of table.csv)" in warning


def test_what_one_run_decided_another_reads(tmp_path):
    """As the server's decision reaches a site: other rows, the same columns, means and levels."""
    first = load(spec(written(tmp_path)))
    stated = json.loads(json.dumps(first.preprocessing.spec()))
    assert preprocessing_from(stated) == first.preprocessing
    file = tmp_path / "table.json"
    file.write_text(json.dumps(stated))
    other = written(tmp_path, [ROWS[0], "90,f,9,a,no", "80,m,8,a,yes"], "site.csv")
    second = load(spec(other, statistics=str(file)))
    assert second.preprocessing == first.preprocessing
    age = first.preprocessing.numeric[0]
    assert float(second.train.inputs["numbers"][0, 0]) == pytest.approx((90 - age.mean) / age.scale)


def test_a_client_s_own_scale():
    numbers = torch.tensor([[1.0, 5, 1], [3, 5, 0], [5, 5, 1]], dtype=torch.float64)
    found = rescaled({"numbers": numbers}, numbers[:2], columns=2)["numbers"]
    assert found.tolist() == [[-1, 0, 1], [1, 0, 0], [3, 0, 1]]


@pytest.mark.parametrize(
    ("rows", "settings", "sentence"),
    [
        (
            ["age,ill", "60,a", "old,b", "50,a"],
            {},
            "'old' in line 3 of table.csv is no number, and column 'age'",
        ),
        (["age,x,ill", "6,,a", "5,?,b"], {}, "Column 'x' has no value in any train row"),
        (["age,ill", ",a", "NA,b"], {}, "None of the 2 rows of 'train' has"),
        (["age,ill", "6,a", "5,b"], {"label_column": "sick"}, "dataset.label_column names 'sick'"),
        (["age,ill", "6,a", "5,b"], {"label_column": None}, "dataset.label_column is missing"),
        (["age,ill", "6,a", "5,b"], {"columns": ("weight",)}, "dataset.columns names 'weight'"),
        (["age,ill", "6,a", "5,b"], {"columns": ("ill",)}, "dataset.columns names 'ill', which is the label"),
        (["age,ill", "6,a", "5,b"], {"categorical": ("sex",)}, "dataset.categorical names 'sex'"),
        (["ill", "a", "b"], {}, "no column to predict 'ill' from"),
        (["age,ill", "6,a", "5,a"], {}, "The train rows have 1 class"),
        (["age,ill", "inf,1", "5,2"], {}, "'inf' in line 2 of table.csv is not finite"),
        (["age,ill", "6,4", "5,x"], {"task": "regression"}, "'x' in line 3 of table.csv is no number"),
        (["age,ill", "6,a", "5,b"], {"task": "entities"}, "dataset.task=entities does not fit"),
        (
            ["age,t,e", "6,-1,1", "5,3,0"],
            {"task": "survival", "time_column": "t", "event_column": "e"},
            "The time in line 2 of table.csv is -1, below 0",
        ),
        (["age,t,e", "6,1,1"], {"task": "survival", "time_column": "t"}, "dataset.event_column is missing"),
        (["name,ill", *(f"n{n},{n % 2}" for n in range(60))], {}, "Column 'name' holds 60 different texts"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, rows, settings, sentence):
    with pytest.raises(UserError, match=sentence.replace("(", r"\(").replace("?", r"\?")):
        load(spec(written(tmp_path, rows), **settings))


def test_a_column_that_one_site_lacks_is_named(tmp_path):
    written(tmp_path, ["age,chol,ill", "6,1,a", "5,2,b"], "hearts/cleveland.csv")
    written(tmp_path, ["age,ill", "6,a", "5,b"], "hearts/va.csv")
    with pytest.raises(UserError, match=r"va\.csv lacks the column 'chol'"):
        load(spec(tmp_path / "hearts"))
    assert load(spec(tmp_path / "hearts", columns=("age",))).preprocessing.columns == ("age",)


def test_a_site_that_lacks_a_column_of_the_federation_says_so():
    table = preprocessing_of([(1.0, 2.0), (2.0, 4.0)], ("age", "chol"), ("", ""))
    with pytest.raises(UserError, match="These rows have no column 'chol', which the federation reads"):
        table.inputs([(1.0,)], ("age",), ("line 2",))


@pytest.mark.parametrize(
    "broken", [{}, {"columns": {"age": {"median": 1, "mean": 2}}}, {"columns": {"sex": {"levels": "mf"}}}]
)
def test_statistics_that_are_none_are_refused(tmp_path, broken):
    file = tmp_path / "table.json"
    file.write_text(json.dumps(broken))
    with pytest.raises(UserError, match=r"cannot be read as a table\.json"):
        load(spec(written(tmp_path), statistics=str(file)))
