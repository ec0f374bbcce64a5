"""Calibration under masks: what parts send hides their counts, and the rule is that of all rows together."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.calibration.calibrate import rule_of
from fedfrozen_app.calibration.calibration_rows import Part
from fedfrozen_app.calibration.masked_sum import MaskedSum
from fedfrozen_app.calibration.quantile import rank_of
from fedfrozen_app.calibration.temperature import part_of
from fedfrozen_app.config import SecureAggregationConfig
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.secure.sum_up import Collector
from fedfrozen_app.study.masked_numbers import vector_of
from tests.calibration.test_calibration import WORDS, digits, drawn
from tests.conftest import SMALL

__all__ = ["digits"]  # a fixture


def test_masks_change_no_count_and_the_temperature_by_its_rounding(digits):
    """The threshold is, to the bit, that of all rows at the temperature; the temperature is off by what an
    error of 2⁻⁴¹ in each part's derivative makes."""
    logits, labels = digits
    parts, _ = drawn(logits, labels, 3)
    parts.append(Part("empty", logits[:0], labels[:0], np.zeros(0, dtype=bool)))
    masks = SecureAggregationConfig(name="on", min_cohort=3)
    masked = MaskedSum([f"site {n}" for n, _ in enumerate(parts)], masks)
    one, other = (rule_of(parts, 0.9, classes=True, masked=own) for own in (masked, None))
    first = [(p.logits[p.first], p.labels[p.first]) for p in parts]
    curvature = sum(part_of(*own)(1 / other.temperature)[1] for own in first)
    assert 0 < masked.rounding == len(parts) * 2.0**-41
    assert abs(1 / one.temperature - 1 / other.temperature) <= 3 * masked.rounding / curvature
    rest = [one.scores(p.logits[~p.first], p.labels[~p.first]) for p in parts]
    together = np.sort(np.concatenate(rest))
    assert one.threshold == together[rank_of(0.9, len(together)) - 1]
    assert abs(one.threshold - other.threshold) <= 1e-12
    with pytest.raises(UserError, match=r"keys.*min_cohort=40.*--rows server"):
        rule_of(parts, 0.9, classes=True, masked=MaskedSum(masked.names, replace(masks, min_cohort=40)))


def test_a_masked_vector_hides_the_counts(monkeypatch):
    """What a part sends is another at every sum, and is not its counts; the sum is exact."""
    sent = []
    real = Collector.take_vector
    monkeypatch.setattr(
        Collector, "take_vector", lambda self, name, v: (sent.append(v.head.copy()), real(self, name, v))[1]
    )
    masked = MaskedSum(["a", "b", "c"], SecureAggregationConfig(name="on"))
    parts = [np.array([0.0, 5.0]), np.array([1.0, 0.25]), np.zeros(2)]
    for _ in range(2):
        assert masked(parts).tolist() == [1.0, 5.25]
    plain = vector_of(parts[0]).head
    assert len(sent) == 6 and not any((one == plain).any() for one in sent)
    assert not (sent[0] == sent[3]).any()


@pytest.mark.slow
def test_a_masked_run_is_calibrated_under_masks(tmp_path, capsys):
    run = tmp_path / "run"
    assert command([*SMALL, *WORDS, "secure_aggregation=on", f"output_dir={run}"]) == 0
    capsys.readouterr()
    assert command(["calibrate", str(run), "--coverage", "0.8"]) == 0
    assert "Each client's sums and counts were masked" in capsys.readouterr().out
    found = json.loads((run / "calibration.json").read_text())
    assert found["masked"] and found["rows"]["source"] == "clients" and found["rows"]["parts"] == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedfrozen_app.calibration.calibrate.masks_of", lambda *args: None)
        assert command(["calibrate", str(run), "--coverage", "0.8"]) == 0
    central = json.loads((run / "calibration.json").read_text())
    assert not central["masked"] and central["rows"] == found["rows"]
    assert abs(found["threshold"] - central["threshold"]) <= 1e-12
    assert abs(found["temperature"] - central["temperature"]) <= 1e-12
