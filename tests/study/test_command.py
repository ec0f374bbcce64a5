"""`fedfrozen survival FILE`: sites that are the values of a column, in one process."""

import json
import re

import numpy as np
import pandas
import pytest
from sksurv.compare import compare_survival
from sksurv.nonparametric import kaplan_meier_estimator
from sksurv.util import Surv
from statsmodels.duration.hazard_regression import PHReg

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.survival.time_edges import edges_every
from tests.conftest import slowly
from tests.survival.drawn import SITES, study

WORDS = ["--time", "time", "--event", "event"]
ALL = [*WORDS, "--group", "arm", "--covariates", "age,marker", "--site", "site"]


def patients(seed: int = 1, studies: int = 1) -> pandas.DataFrame:
    frame = pandas.concat([pandas.DataFrame(study(seed + 2 * number)) for number in range(studies)])
    return frame.assign(
        site=[SITES[site] for site in frame["site"]], arm=np.where(frame["arm"], "new", "usual")
    )


def run(tmp_path, frame: pandas.DataFrame, *words: str) -> dict:
    frame.to_csv(tmp_path / "patients.csv", index=False)
    out = tmp_path / "out"
    assert command(["survival", str(tmp_path / "patients.csv"), *words, f"output_dir={out}"]) == 0
    return json.loads((out / "survival.json").read_text())


def test_sites_of_a_file_give_what_the_pooled_rows_give(tmp_path, capsys):
    frame = patients()
    found = run(tmp_path, frame, *ALL)
    times, survival = kaplan_meier_estimator(frame["event"] == 1, frame["time"])
    assert found["all"]["times"] == times.tolist()
    np.testing.assert_allclose(found["all"]["survival"], survival, rtol=0, atol=1e-12)
    known = Surv.from_arrays(frame["event"] == 1, frame["time"])
    statistic, p = compare_survival(known, frame["arm"].to_numpy())
    assert [found["log_rank"]["statistic"], found["log_rank"]["p"]] == pytest.approx(
        [statistic, p], abs=1e-12
    )
    fit = PHReg(frame["time"], frame[["age", "marker"]], status=frame["event"], ties="efron").fit(tol=1e-12)
    rows = found["cox"]["covariates"]
    assert [row["coefficient"] for row in rows] == pytest.approx(fit.params.tolist(), abs=1e-6)
    assert [row["error"] for row in rows] == pytest.approx(fit.bse.tolist(), abs=1e-6)
    sites = found["sites"]
    assert {name: site["people"] for name, site in sites.items()} == frame["site"].value_counts().to_dict()
    assert sites["D"]["events"] == 0 and found["problem"] == "" and found["refused"] == {}
    assert "Log-rank: chi²" in capsys.readouterr().out
    page = (tmp_path / "out" / "survival.html").read_text()
    ends = {one["name"]: one["points"][-1][0] for one in drawn(page)[0]["series"]}
    assert ends == frame.groupby("arm")["time"].max().to_dict()
    assert "Survival at 4 sites" in page and "Cox regression" in page and "People at risk" in page


def drawn(page: str) -> list[dict]:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page)[1])[
        "charts"
    ]


def test_edges_and_floors_hide_small_counts_and_the_curve_is_that_of_rounded_times(tmp_path):
    frame = patients(studies=12)
    found = run(tmp_path, frame, *ALL, "--every", "50", "--until", "150", "--floor", "3", "--by-site")
    shown = [0.0, *found["all"]["times"]]
    assert set(shown) <= {0.0, 50.0, 100.0, 150.0} and len(shown) > 2
    time = np.array(shown)[np.maximum(np.searchsorted(shown, np.minimum(frame["time"], 150)), 1)]
    event = (frame["event"] == 1) & (frame["time"] <= 150)
    _, survival = kaplan_meier_estimator(event.to_numpy(), time)
    np.testing.assert_allclose(found["all"]["survival"], survival, rtol=0, atol=1e-12)
    values = frame[["age", "marker"]].to_numpy()
    fit = PHReg(time, values, status=event, ties="efron", strata=frame["site"]).fit(tol=1e-12)
    assert [row["coefficient"] for row in found["cox"]["covariates"]] == pytest.approx(fit.params, abs=1e-6)
    assert found["cox"]["strata"] == "site"


def test_noise_is_drawn_afresh_and_the_people_at_risk_never_increase(tmp_path):
    words = [*WORDS, "--site", "site", "--every", "30", "--until", "300", "--epsilon", "1"]
    one, other = (run(tmp_path, patients(studies=3), *words) for _ in range(2))
    assert one["all"]["at_risk"] != other["all"]["at_risk"]
    assert all(
        low >= high for low, high in zip(one["all"]["at_risk"], one["all"]["at_risk"][1:], strict=False)
    )
    assert all(site["people"] is None for site in one["sites"].values())
    assert one["all"]["people"] == pytest.approx(len(patients(studies=3)), abs=60)
    assert "noise" in (tmp_path / "out" / "survival.html").read_text()


def spoilt(column: str, row: int, value: object) -> pandas.DataFrame:
    frame = patients().astype({column: object})
    frame.iloc[row, frame.columns.get_loc(column)] = value
    return frame


BAD = {
    "negative": (spoilt("time", 3, -2), ALL, "followed for a time below 0"),
    "no event": (patients().assign(event=0), ALL, "No one has the event"),
    "event 2": (spoilt("event", 3, 2), ALL, "The column event holds '2': write 1"),
    "no site": (spoilt("site", 3, ""), ALL, "1 of 107 rows do not say their site"),
    "one level": (patients().assign(arm="new"), ALL, "has one level alone"),
    "other level": (patients(), [*WORDS, "--group", "arm=new,old"], "none of the groups new, old"),
    "text": (spoilt("age", 3, "old"), ALL, "The column age holds 'old', which is no number"),
    "edges": (patients(), [*WORDS, "--every", "50", "--until", "10"], "give a step above 0"),
    "half": (patients(), [*WORDS, "--every", "50"], "--every and --until go together"),
    "no column": (patients(), [*WORDS, "--covariates", "weight"], "There is no column weight"),
    "noise": (patients(), [*WORDS, "--epsilon", "1"], "noise (epsilon) is for counts between edges"),
    "empty": (patients().assign(age=""), ALL, "No site has a row with all of"),
    "twice": (patients(), [*WORDS, "--covariates", "time"], "are columns of their own"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_writes_nothing(tmp_path, case, capsys):
    frame, words, sentence = BAD[case]
    frame.to_csv(tmp_path / "patients.csv", index=False)
    assert (
        command(["survival", str(tmp_path / "patients.csv"), *words, f"output_dir={tmp_path / 'out'}"]) == 2
    )
    shown = capsys.readouterr().err
    assert sentence in re.sub(r"\s+", " ", shown) and "Traceback" not in shown
    assert not (tmp_path / "out" / "survival.json").exists()


def test_edges_of_a_file_must_increase(tmp_path, capsys):
    patients().to_csv(tmp_path / "patients.csv", index=False)
    words = ["survival", str(tmp_path / "patients.csv"), *WORDS, "--edges", str(tmp_path / "edges.txt")]
    for text, sentence in (
        ("0 90 60", "must increase, and 60 comes after 90"),
        ("0 a", "holds something that is no number"),
    ):
        (tmp_path / "edges.txt").write_text(text)
        assert command(words) == 2
        assert sentence in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert edges_every(0.1, 0.3) == pytest.approx((0, 0.1, 0.2, 0.3))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda frame: frame.assign(marker=3), "The covariate marker has one value at all sites"),
        (lambda frame: frame.assign(marker=1 - frame["age"]), "age and marker determine each other"),
        (lambda frame: frame.assign(marker=frame["event"]), "The coefficient of marker grows without end"),
    ],
)
def test_a_regression_that_is_not_possible_leaves_the_curves(tmp_path, change, sentence, capsys):
    frame = change(patients())
    frame.to_csv(tmp_path / "patients.csv", index=False)
    assert command(["survival", str(tmp_path / "patients.csv"), *ALL, f"output_dir={tmp_path / 'out'}"]) == 2
    assert sentence in re.sub(r"\s+", " ", capsys.readouterr().err)
    found = json.loads((tmp_path / "out" / "survival.json").read_text())
    assert found["cox"] is None and sentence in found["problem"] and found["all"]["events"] == 38


def test_a_site_without_a_full_row_adds_nothing_and_is_named(tmp_path, capsys):
    frame = patients()
    frame.loc[frame["site"] == "A", "age"] = np.nan
    found = run(tmp_path, frame, *ALL)
    assert found["sites"]["A"]["people"] == 0
    assert found["sites"]["A"]["left_out"] == (frame["site"] == "A").sum()
    assert "A has no row with all values" in capsys.readouterr().out
    assert found["all"]["people"] == (frame["site"] != "A").sum()


# Masks ----------------------------------------------------------------------------------------------------

EDGES = ["--every", "30", "--until", "180", "--floor", "3"]
MASKED = "secure_aggregation=on"


@pytest.mark.parametrize("strata", [[], *slowly(["--by-site"], ["--ties", "breslow"])])
def test_masked_sums_give_what_open_ones_give(tmp_path, strata):
    """Counts to the bit, coefficients to the stated rounding; of a site itself nothing is known."""
    frame = patients(1, 6)
    open_study = run(tmp_path, frame, *ALL, *EDGES, *strata)
    masked = run(tmp_path, frame, *ALL, *EDGES, *strata, MASKED)
    for key in ("all", "groups", "log_rank"):
        assert masked[key] == open_study[key]
    for one, other in zip(masked["cox"]["covariates"], open_study["cox"]["covariates"], strict=True):
        for key in ("coefficient", "error", "p", "low", "high"):
            assert one[key] == pytest.approx(other[key], abs=1e-9), key
    assert masked["masks"]["sites"] == sorted(masked["sites"]) == list("ABCD")
    for site in masked["sites"].values():
        assert [site[key] for key in ("people", "events", "groups", "left_out")] == [None] * 4
    page = (tmp_path / "out" / "survival.html").read_text()
    assert "masked sums over 4 sites" in page and "sums over A, B, C, D alone" in page


@pytest.mark.slow
def test_a_masked_study_with_noise_is_a_sum_of_noised_counts(tmp_path):
    frame = patients(1, 6)
    found = run(tmp_path, frame, *WORDS, "--site", "site", *EDGES, "--epsilon", "50", MASKED)
    exact = run(tmp_path, frame, *WORDS, "--site", "site", *EDGES, "--floor", "1")
    assert found["all"]["events"] == pytest.approx(exact["all"]["events"], abs=3)
    np.testing.assert_allclose(found["all"]["survival"], exact["all"]["survival"], atol=0.05)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            [*ALL, MASKED],
            "This study cannot be asked for: masks are for counts between edges: exact times would name each "
            "person's time.",
        ),
        (
            [*ALL, *EDGES, MASKED, "secure_aggregation.min_cohort=5"],
            "4 sites would be in the sum, and it must be 5 (secure_aggregation.min_cohort): ask more "
            "sites, or take wider edges or fewer groups.",
        ),
    ],
    ids=["exact", "few"],
)
def test_a_masked_study_that_cannot_be_is_one_sentence(tmp_path, capsys, words, sentence):
    patients(1, 6).to_csv(tmp_path / "patients.csv", index=False)
    code = command(["survival", str(tmp_path / "patients.csv"), *words, f"output_dir={tmp_path}/out"])
    assert code == 2 and f"fedfrozen: {sentence}\n" == capsys.readouterr().err


def test_what_leaves_a_site_is_uniform_and_its_numbers_are_hidden(tmp_path):
    """The words of one masked sum spread over all of 64 bits, although the counts are small; twice the same
    study gives other words."""
    from fedfrozen_app.secure.vector import WIDE
    from fedfrozen_app.study.masked_numbers import size_of
    from fedfrozen_app.study.masked_steps import MASKED as STEP
    from fedfrozen_app.study.masked_steps import read_vector
    from fedfrozen_app.study.masked_study import MaskedSites
    from fedfrozen_app.study.simulated_study import deal, in_process_masked
    from fedfrozen_app.study.study_ask import COUNTS, Masks, Step, StudyAsk
    from fedfrozen_app.survival.people import Columns

    frame, edges = patients(1, 6), (0.0, *(float(edge) for edge in range(30, 181, 30)))
    cells = {name: frame[name].tolist() for name in ("time", "event", "site")}
    ask = StudyAsk("one", Columns("time", "event"), edges=edges, floor=3, masks=Masks(3, 2 / 3, None))
    sent: list[str] = []

    def masked_words():
        exchange = in_process_masked(ask, deal(cells, "site"))

        def listening(texts):
            found, refused = exchange(texts)
            if any(json.loads(text)["step"] == STEP for text in texts.values()):
                sent.extend(found[name] for name in sorted(found))
            return found, refused

        sites = MaskedSites(ask, listening)
        shown = sites.edges()
        return sites.counts(shown)

    one, two = masked_words(), masked_words()
    assert one.tables == two.tables
    size = size_of(ask, Step(COUNTS, tuple(one.tables[0]["events"]["times"])))
    words = [read_vector(text, size).head for text in sent]
    assert all(len(own) == 2 * size and (own > 2**48).mean() > 0.9 for own in words)
    assert len({own.tobytes() for own in words}) == len(words) == 8
    assert words[0].dtype == WIDE


@pytest.mark.parametrize("step", ["masked", "confirm", *slowly("keys", "shares", "unmask")])
def test_a_site_that_is_gone_is_left_out_or_ends_the_study(step):
    """Before its sum is in, the others' sum is given; after that, theirs with its own."""
    from fedfrozen_app.study.conduct import conduct_masked
    from fedfrozen_app.study.masked_study import MaskedSites
    from fedfrozen_app.study.simulated_study import deal, in_process_masked
    from fedfrozen_app.study.study_ask import Masks, StudyAsk
    from fedfrozen_app.survival.people import Columns

    frame, edges = patients(1, 6), (0.0, 60.0, 120.0, 180.0)
    cells = {name: frame[name].tolist() for name in ("time", "event", "site")}
    ask = StudyAsk("one", Columns("time", "event"), edges=edges, floor=3, masks=Masks(3, 2 / 3, None))
    exchange = in_process_masked(ask, deal(cells, "site"))

    def losing(texts):
        asked = json.loads(next(iter(texts.values())))
        name = asked["question"]["step"] if asked["step"] == "masks" else asked["step"]
        if name != step:
            return exchange(texts)
        return exchange({site: text for site, text in texts.items() if site != "B"})[0], {"B": "it is gone"}

    found = conduct_masked(ask, MaskedSites(ask, losing))
    inside = step in ("confirm", "unmask")
    assert found["masks"]["sites"] == (list("ABCD") if inside else list("ACD"))
    kept = frame if inside else frame[frame["site"] != "B"]
    assert found["all"]["people"] == len(kept)
    assert found["refused"] == {"B": "it is gone"}
