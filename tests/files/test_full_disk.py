"""A disk that gives out at any write of a run: one sentence, nothing lost, and the repeat finishes."""

import shutil
from pathlib import Path

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands import repair
from fedfrozen_app.files import status
from fedfrozen_app.files.disk import RESERVE, replace_file
from fedfrozen_app.report import output
from fedfrozen_app.run import evaluation
from tests.conftest import Run, same_bits, slowly
from tests.files.damage import TINY, Outcome, carry_out
from tests.files.full_disk import full_from

WRITES = 39  # of the run below; the test counts them
ROW, REPORT, LAST = 26, 36, 39  # the second round's row, a page, and the state at the end


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Pictures take longer than everything else."""
    for module in (output, repair):
        monkeypatch.setattr(module, "write_curves", lambda rows, path, title: replace_file(path, "curves"))
    monkeypatch.setattr(
        evaluation, "draw_labels", lambda worker, folder: replace_file(folder / "labels.png", "picture")
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run without a fault, and how often it writes."""
    place = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "write_curves", lambda rows, path, title: replace_file(path, "curves"))
        patch.setattr(
            evaluation, "draw_labels", lambda worker, folder: replace_file(folder / "labels.png", "picture")
        )
        with full_from(place / "run", None) as disk:
            assert do(place, *TINY, f"output_dir={place}/run").code == 0
    return Run(place / "run"), disk


def do(place: Path, *words: str) -> Outcome:
    return carry_out(lambda _: command(list(words)), place)


def test_the_writes_of_a_run_are_counted(whole):
    _, disk = whole
    assert disk.count == WRITES, "\n".join(disk.where)
    assert disk.where[ROW - 1] == "metrics.jsonl" and disk.where[REPORT - 1].startswith(".report.html")
    assert disk.where[LAST - 1].startswith(".status.json")
    assert not (whole[0].folder / RESERVE).exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "last", [ROW, LAST, *slowly(*(n for n in range(1, WRITES + 1) if n not in (ROW, LAST)))]
)
def test_a_disk_that_is_full_from_this_write_on(whole, tmp_path, last):
    folder = tmp_path / "run"
    words = [*TINY, f"output_dir={folder}"]
    with full_from(folder, last) as disk:
        done = do(tmp_path, *words)
    if last == LAST:  # the space was reserved for it
        assert disk.refused and done.code == 0 and status.read(folder).state == "complete", done.text
        return
    assert_told(done, disk.refused)
    assert not list(folder.glob(".*.part")), sorted(path.name for path in folder.iterdir())
    for verb in ("show", "list", "verify"):
        looked = do(tmp_path, verb, str(folder))
        assert "Traceback" not in looked.text and looked.code in (0, 1, 2)
    known = status.read(folder)
    if known is not None and (folder / "manifest.jsonl").exists():
        assert known.state != "running" or not disk.credit, known  # with the reserve it says how it ended
    again = do(tmp_path, *(["resume", str(folder)] if "fedfrozen resume" in done.text else words))
    assert again.code == 0, again.text
    assert status.read(folder).state == "complete"
    assert_same(whole[0], Run(folder))
    checked = do(tmp_path, "verify", str(folder))
    assert checked.code == 0, checked.text


def assert_told(done: Outcome, refused: str) -> None:
    assert refused, "the disk had room for everything"
    assert done.code in (1, 2), done.text
    assert "Traceback" not in done.text and "No space left on device" in done.text, done.text
    assert "make room" in done.text.lower() or "output_dir" in done.text, done.text


def assert_same(one: Run, other: Run) -> None:
    assert same_bits(one.model, other.model)
    timeless = [
        [{k: v for k, v in row.items() if "seconds" not in k} for row in run.rows] for run in (one, other)
    ]
    assert timeless[0] == timeless[1]
    assert one.summary["final_test_accuracy"] == other.summary["final_test_accuracy"]


# Other verbs ----------------------------------------------------------------------------------------------

AGAIN = ("audit", "{}", "rows=10", "shadow_pairs=1", "shadow_epochs=1")
PEOPLE = "days,died,hospital\n" + "".join(f"{5 + n % 40},{n % 2},{'ab'[n % 2]}\n" for n in range(80))
STUDY = ("survival", "{}/../people.csv", "--time", "days", "--event", "died", "--site", "hospital")


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        ("report", "{}"),
        ("verify", "{}", "--repair"),
        (*STUDY, "output_dir={}/../study"),
        *slowly(
            ("compare", "{}"),
            ("baselines", "{}"),
            ("fairness", "{}", "--bootstrap", "3"),
            ("export", "{}", "{}/../exported"),
            ("census", *TINY, "output_dir={}/../census"),
            ("theory", "seeds=1", "rounds=3", "output_dir={}/../theory", "hydra.output_subdir=null"),
            AGAIN,
        ),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else str(words),
)
def test_a_verb_on_a_full_disk_ends_with_one_sentence(whole, tmp_path, words, named):
    run = tmp_path / "run"
    shutil.copytree(whole[0].folder, run)
    (run / "report.html").write_text("")  # something to repair
    (tmp_path / "people.csv").write_text(PEOPLE)
    line = [word.format(run) for word in words]
    with full_from(tmp_path, 1, named=named):
        done = do(tmp_path, *line)
    assert done.code == 2 and "Traceback" not in done.text, done.text
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("fedfrozen: ") and "No space left on device" in last, last
    assert f"{tmp_path}/" in last, "it names no file"
    assert not list(tmp_path.rglob("*.part")), "half a file is left"
    again = do(tmp_path, *line)
    assert again.code == 0, again.text
    if words[0] in ("report", "verify"):
        assert (run / "report.html").stat().st_size > 1000


# A sweep --------------------------------------------------------------------------------------------------


SWEEP_POINTS = [*range(1, 20, 3), *range(20, 80, 7)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("last", SWEEP_POINTS)
def test_a_sweep_on_a_disk_that_is_full_from_this_write_on(whole, tmp_path, last):
    words = ["-m", *TINY, "seed=0,1", f"output_dir={tmp_path}/sweep"]
    with full_from(tmp_path / "sweep", last) as disk:
        done = do(tmp_path, *words)
    assert_told(done, disk.refused)
    for verb in ("list", "compare", "verify"):
        looked = do(tmp_path, verb, str(tmp_path / "sweep"))
        assert "Traceback" not in looked.text and looked.code in (0, 1, 2)
    again = do(tmp_path, *words)
    assert again.code == 0, again.text
    members = sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.name.isdigit())
    assert members == ["0", "1"]  # nothing half-written is left beside them
    assert same_bits(Run(tmp_path / "sweep" / "0").model, whole[0].model)
    checked = do(tmp_path, "verify", str(tmp_path / "sweep"))
    assert checked.code == 0, checked.text
