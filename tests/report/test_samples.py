"""What a model wrote, in the report: escaped, and absent where there is none."""

import json
from pathlib import Path

from fedfrozen_app.report.run_page import render
from fedfrozen_app.report.sample_texts import read_samples


def texts_of(run: Path) -> str:
    page = render([], {}, None, name="run", samples=read_samples(run))
    return page.partition("<h2>Text</h2>")[2].partition("<h2>")[0]


def test_whatever_a_model_writes_is_text_on_the_page(tmp_path):
    bad = "<script>alert('x')</script> & more"
    (tmp_path / "samples.json").write_text(json.dumps([{"prompt": "<b>", "answer": "yes", "after": bad}]))
    page = texts_of(tmp_path)
    assert "<script>" not in page and "&lt;script&gt;" in page and "&lt;b&gt;" in page
    assert "before training" not in page and "after" in page


def test_no_file_or_a_broken_one_is_no_section(tmp_path):
    assert texts_of(tmp_path) == ""
    (tmp_path / "samples.json").write_text('{"a": 1')
    assert texts_of(tmp_path) == ""
    (tmp_path / "samples.json").write_text("[1]")
    assert texts_of(tmp_path) == ""
