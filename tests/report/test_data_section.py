"""Every run keeps an account of its rows: data.json, the summary and the report."""

import json

import fedfrozen
from fedfrozen_app.report.data_section import brief, data_section, read_data
from fedfrozen_app.report.run_page import run_page

TEXTS = "".join(
    f"pain {n} in the {'chest' if n % 2 else 'knee'},{'A' if n % 2 else 'B'}\n" for n in range(40)
)


def test_run_writes_what_it_read_and_dropped(tmp_path):
    (tmp_path / "notes.csv").write_text(f"text,label\n{TEXTS}lost,NaN\nodd,a\nodd too,a\n,A\n")
    words = ["dataset=text", f"dataset.path={tmp_path}/notes.csv", "strategy=fedavg", "num_rounds=1"]
    words += ["num_clients=2", "partition=iid", "model=bert_tiny", "model.config.hidden_size=8", "device=cpu"]
    words += ["checkpoint.every=0", "track.tensorboard=false", f"output_dir={tmp_path}/run"]
    run = fedfrozen.run(*words)
    found = json.loads((run.folder / "data.json").read_text())
    assert found["splits"]["train"] == {
        "read": 44,
        "dropped": {"a word for a missing value as label": 1, "no content or no label": 1},
    }
    assert found["classes"] == ["A", "B", "a"] and len(found["warnings"]) == 3
    train, test = found["rows"]["train"], found["rows"]["test"]
    assert train["rows"] + test["rows"] == 42 and sum(train["by_class"].values()) == train["rows"]
    dealt = sum(client["rows"] for client in found["clients"].values())
    assert dealt + found["rows"]["server_validation"]["rows"] == train["rows"]
    data = run.summary["data"]
    assert data == brief(found)
    assert (data["train_rows"], data["num_classes"], data["dropped_rows"]) == (train["rows"], 3, 2)
    page = run_page(run.folder)
    assert "<h2>Data</h2>" in page and "labels that are nearly the same" in page
    assert "1 of 44 rows" in page


def test_folder_without_it_still_has_a_page(tmp_path):
    assert read_data(tmp_path) is None and data_section(None) is None
    (tmp_path / "data.json").write_text("[")
    assert read_data(tmp_path) is None
