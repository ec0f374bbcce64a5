"""Published figures follow from the rows: a change of a row, of a page or of a picture is noticed."""

import json
import re
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.pictures

ROOT = Path(__file__).parents[2]
WORDS = 900


@pytest.fixture
def recompute(cells):
    import recompute

    return recompute


@pytest.fixture(scope="module")
def kept():
    return {}


@pytest.fixture
def computed(recompute, kept):
    """From the committed rows; once for all of these tests."""
    if "computed" not in kept:
        kept["computed"] = recompute.Computed.of()
    return kept["computed"]


@pytest.fixture
def copy(recompute, tmp_path):
    """The pages, to be changed."""
    for name in ("docs/results", "docs/figures"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in {page for page, _ in recompute.SECTIONS.values()}:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_every_page_agrees_with_its_rows(recompute, computed):
    assert recompute.check(computed) == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("README.md", "+2.1 ± 2.6", "+3.1 ± 2.6"),
        pytest.param("docs/results/fedfrozen.md", "+4.4 ± 1.8", "+4.9 ± 1.8", marks=pytest.mark.slow),
        pytest.param("docs/results/appendix/map-pacs.md", "80.9", "81.9", marks=pytest.mark.slow),
        pytest.param("docs/results/safl.md", "not distinguished", "worse", marks=pytest.mark.slow),
    ],
)
def test_a_planted_figure_of_a_page_is_found(recompute, computed, copy, name, old, new):
    assert recompute.check(computed, copy) == []
    change(copy / name, old, new)
    found = recompute.check(computed, copy)
    assert found and all(line.startswith(f"{name}: the ") for line in found)
    recompute.write(computed, copy)
    assert recompute.check(computed, copy) == []


def test_a_planted_row_is_found(recompute, computed, tmp_path):
    """One evaluation of one run of 520: pages, README and pictures that depend on it no longer agree."""
    rows = tmp_path / "results"
    shutil.copytree(recompute.RESULTS, rows)
    path = rows / "regimes" / "freezing.jsonl"
    lines = path.read_text().splitlines()
    number = next(
        n
        for n, line in enumerate(lines)
        if '"digits_few","schedule":"constant","rate":"1","freeze":"50 %","scope":"qk"' in line
    )
    before = lines[number]
    lines[number] = re.sub(
        r'("test":\[.*?)0\.(\d+)\]', lambda m: f"{m[1]}0.{9999 - int(m[2]):04d}]", before, count=1
    )
    assert lines[number] != before
    path.write_text("\n".join(lines) + "\n")
    found = recompute.check(recompute.Computed.of(rows))
    changed = {line.partition(":")[0] for line in found}
    assert {"README.md", "docs/results/freezing-under-tuning.md", "docs/results/fedfrozen.md"} <= changed
    assert "docs/figures/freezing-by-schedule.png" in changed
    assert "docs/results/pfeddc.md" not in changed


def test_a_picture_of_other_rows_a_stray_page_and_a_lost_mark_are_found(recompute, computed, copy):
    recompute.stamp(copy / "docs/figures/public.png", "0" * 64)
    (copy / "docs/results/more.md").write_text("A page of nobody.")
    change(copy / "README.md", "<!-- results: end -->", "")
    found = recompute.check(computed, copy)
    assert [line.partition(": ")[0] for line in found] == [
        "docs/results/more.md",
        "README.md",
        "docs/figures/public.png",
    ]


def test_a_template_types_no_result(recompute, tmp_path, monkeypatch):
    assert list(recompute.literals()) == []
    for number, text in enumerate(("It gains +1.2 ± 0.3.", "It reaches 45.6 %.", "It loses -0.4 in all.")):
        (tmp_path / f"{number}.md").write_text(text)
    (tmp_path / "fine.md").write_text("After 50 %, Dirichlet 0.1: {{ gain }}.\n```\nlr=0.1 ± 1\n```")
    monkeypatch.setattr(recompute, "PAGES", tmp_path)
    assert len(list(recompute.literals())) == 3


def test_the_command_says_which_line_differs(recompute, computed, copy, monkeypatch, capsys):
    monkeypatch.setattr(recompute.Computed, "of", lambda results: computed)
    change(copy / "docs/results/public.md", "Beside public numbers", "Beside numbers")
    monkeypatch.setattr("sys.argv", ["recompute.py", "--root", str(copy)])
    with pytest.raises(SystemExit) as ended:
        recompute.main()
    assert ended.value.code == 1
    assert "docs/results/public.md: the page says: # Beside numbers" in capsys.readouterr().out


def test_a_result_page_is_short(computed):
    pages = {name: text for name, text in computed.pages.items() if "/appendix/" not in name}
    assert len(pages) == 6
    for name, text in pages.items():
        assert len(text.split()) <= WORDS, name
        assert text.count("](../figures/") == 1, name
        assert "python benchmarks/recompute.py" in text, name


def test_a_tie_is_an_interval_within_a_point(cells, recompute):
    import evidence

    difference = cells.Difference
    assert evidence.verdict(difference(0.3, 0.6, 0.4, 5)) == "tie"
    assert evidence.verdict(difference(0.3, 0.9, 0.4, 5)) == "not distinguished"
    assert evidence.verdict(difference(-0.9, 0.6, 0.01, 5)) == "behind"


def test_a_new_result_names_its_commit_or_is_refused(cells, monkeypatch):
    import provenance

    monkeypatch.setattr(provenance, "git_commit", lambda: None)
    monkeypatch.delenv("FEDFROZEN_COMMIT", raising=False)
    with pytest.raises(SystemExit, match="set FEDFROZEN_COMMIT"):
        provenance.require_commit()
    monkeypatch.setenv("FEDFROZEN_COMMIT", "abc")
    assert provenance.require_commit() == "abc"


def test_every_result_file_names_its_commit_or_says_what_is_known(recompute):
    known = json.loads((recompute.RESULTS / "commits.json").read_text())["files"]
    for path in sorted(recompute.RESULTS.rglob("*.json*")):
        name = str(path.relative_to(recompute.RESULTS))
        if path.suffix == ".json" and name != "commits.json":
            found = json.loads(path.read_text())
            named = found.values() if name == "capsules.json" else [found]  # of each capsule
            assert all(one.get("commit") or one.get("git_commit") for one in named), name
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            without = sum(not row.get("commit") for row in rows)
            assert without == known.get(name, {}).get("rows_without_commit", 0), name
