"""Write lifelines.json: what lifelines computes on drawn studies.

    python tests/survival/record_lifelines.py

lifelines 0.30 asks for a pandas below 3, which would hold back all other tests: it runs in an environment of
its own, and the tests read what it found.
"""

import json
from pathlib import Path

import drawn  # beside this file
import lifelines
import pandas as pd
from lifelines import CoxPHFitter, KaplanMeierFitter, NelsonAalenFitter
from lifelines.statistics import logrank_test
from lifelines.utils import concordance_index

PLACE = Path(__file__).parent / "lifelines.json"
COX = 6  # studies
PRECISE = {"precision": 1e-12, "max_steps": 100}


def curves(rows: pd.DataFrame) -> dict[str, object]:
    meier = KaplanMeierFitter().fit(rows.time, rows.event)
    aalen = NelsonAalenFitter(nelson_aalen_smoothing=False).fit(rows.time, rows.event)
    one, two = (rows[rows.arm == arm] for arm in (0, 1))
    test = logrank_test(one.time, two.time, one.event, two.event)
    interval = meier.confidence_interval_
    return {
        "times": meier.survival_function_.index.tolist(),
        "survival": meier.survival_function_.iloc[:, 0].tolist(),
        "low": interval.iloc[:, 0].tolist(),
        "high": interval.iloc[:, 1].tolist(),
        "hazard": aalen.cumulative_hazard_.iloc[:, 0].tolist(),
        "median": meier.median_survival_time_,
        "log_rank": [float(test.test_statistic), float(test.p_value)],
    }


def cox(rows: pd.DataFrame, strata: bool) -> dict[str, object]:
    used = rows[["time", "event", "age", "marker", "arm", *(["site"] if strata else [])]]
    fit = CoxPHFitter().fit(used, "time", "event", strata=["site"] if strata else None, fit_options=PRECISE)
    return {
        "coefficients": fit.params_.tolist(),
        "errors": fit.standard_errors_.tolist(),
        "p": fit.summary["p"].tolist(),
        "value": float(fit.log_likelihood_),
    }


def main() -> None:
    found: dict[str, object] = {
        "lifelines": lifelines.__version__,
        "curves": [],
        "cox": [],
        "concordance": [],
    }
    for seed in range(drawn.CASES):
        rows = pd.DataFrame(drawn.study(seed))
        found["concordance"].append(concordance_index(rows.time, -rows.marker.round(1), rows.event))
        if seed < COX:
            found["curves"].append(curves(rows))
            found["cox"].append({"efron": cox(rows, False), "strata": cox(rows, True)})
    PLACE.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
