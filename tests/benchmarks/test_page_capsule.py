"""A results page with its runs in one file: it is whole, and each way to change a figure is named."""

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.strict import hash_of
from tests.conftest import SMALL

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Folders of runs, rows and pages, and the capsule of the page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        import conformal
        import page_capsule

        patch.setattr(conformal, "SPLITS", 2)
        base = tmp_path_factory.mktemp("page")
        runs, results, root, page = base / "runs", base / "results", base / "root", "conformal"
        words = [*SMALL, "dataset.limit=600", "partition=iid", "dataset.client_validation=0.5"]
        assert command([*words, "baseline=false", f"output_dir={runs}/digits"]) == 0
        results.mkdir()
        conformal.score("digits", runs / "digits", base)
        conformal.split("digits", base, results / "conformal.jsonl")
        study = page_capsule.STUDIES[page]
        path = root / "docs" / study.path
        path.parent.mkdir(parents=True)
        path.write_text(page_capsule.rendered(study, (page_capsule.PAGES / study.path).read_text(), results))
        digest = page_capsule.write(page, runs, base / "page.zip", root, results)
        return base, digest


def checked(path, base, digest=None):
    import page_capsule

    return page_capsule.check(path, digest, base / "root", base / "results")


def test_page_rows_and_runs_agree_and_the_cells_run_again(published, capsys):
    base, digest = published
    assert checked(base / "page.zip", base, digest) == 0
    assert "every figure of the page follows from its rows" in capsys.readouterr().out
    assert json.loads((base / "results" / "capsules.json").read_text())["conformal"]["digest"] == digest
    assert command(["reproduce", str(base / "page.zip"), "--digest", digest]) == 0
    assert "digits: same bits" in capsys.readouterr().out
    # From the cell that was run again to the rows of the page.
    import conformal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conformal, "SPLITS", 2)
        (base / "again").mkdir()
        conformal.score("digits", base / "page-reproduced" / "runs" / "digits", base / "again")
        conformal.split("digits", base / "again", base / "again" / "rows.jsonl")
    keys = ("covered", "rows", "threshold", "temperature", "clients", "central")
    one, other = (
        [
            {key: json.loads(line)[key] for key in keys}
            for line in path.joinpath(name).read_text().splitlines()
        ]
        for path, name in ((base / "results", "conformal.jsonl"), (base / "again", "rows.jsonl"))
    )
    assert one == other and len(one) == 2


def test_a_later_page_is_said_and_is_no_problem(published, tmp_path, capsys):
    base, _ = published
    page = next((base / "root").rglob("conformal.md"))
    before = page.read_text()
    try:
        page.write_text(before + "More.\n")
        assert checked(base / "page.zip", base) == 0
        assert "Other in this checkout: page/page.md" in capsys.readouterr().out
    finally:
        page.write_text(before)


CHANGES = {
    "a figure of the page": "page/page.md: the page says",
    "a row": "page/page.md: the page says",
    "a row of another run": "split 0 of digits belongs to no run of the capsule",
    "a template that reaches for more": "page/template.md cannot be computed from its rows",
    "the list of digests": "capsule.json is not as it was written",
    "no rows": "page/rows/conformal.jsonl is missing",
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_named_though_all_digests_are_right(kind, published, tmp_path, capsys):
    base, _ = published
    with zipfile.ZipFile(base / "page.zip") as whole:
        files = {name: whole.read(name) for name in whole.namelist()}
    rows, record = "page/rows/conformal.jsonl", json.loads(files["capsule.json"])
    if kind == "a figure of the page":
        files["page/page.md"] = files["page/page.md"].replace(b" % |", b"9 % |", 1)
    elif kind == "a row":
        first, *more = [json.loads(line) for line in files[rows].splitlines()]
        lines = [first | {"covered": first["covered"] - 9}, *more]
        files[rows] = "".join(json.dumps(line) + "\n" for line in lines).encode()
    elif kind == "a row of another run":
        text = files[rows].decode()
        files[rows] = text.replace('"accuracy": 0.', '"accuracy": 0.0', 1).encode()
    elif kind == "a template that reaches for more":
        files["page/template.md"] = b"{{ conformal.__class__.__init__.__globals__ }}"
    elif kind == "no rows":
        del files[rows]
    record["files"] = {
        name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name != "capsule.json"
    }
    record["sha256"] = hash_of({key: value for key, value in record.items() if key != "sha256"})
    if kind == "the list of digests":
        record["machine"]["cores"] = 4096
    files["capsule.json"] = json.dumps(record).encode()
    changed = tmp_path / "changed.zip"
    with zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in files.items():
            out.writestr(name, content)
    assert checked(changed, base) == 1
    assert CHANGES[kind] in capsys.readouterr().out


def test_no_capsule_is_written_of_a_page_that_does_not_follow(published, tmp_path):
    import page_capsule

    base, _ = published
    page = next((base / "root").rglob("conformal.md"))
    before = page.read_text()
    try:
        page.write_text(before.replace(" % |", "9 % |", 1))
        with pytest.raises(UserError, match=r"No capsule was written: page/page\.md: the page says"):
            page_capsule.write(
                "conformal", base / "runs", tmp_path / "x.zip", base / "root", base / "results"
            )
        assert not (tmp_path / "x.zip").exists()
    finally:
        page.write_text(before)
