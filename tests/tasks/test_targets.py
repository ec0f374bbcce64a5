"""Kinds of target: metrics by hand, labels, and one that another package brings."""

import pytest
import torch

from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources.raw_rows import DatasetSpec
from fedfrozen_app.files.rows import metric_name
from fedfrozen_app.tasks.regression import Regression
from fedfrozen_app.tasks.target import metric_names, target_of


def test_regression_is_measured_in_the_label_s_own_units():
    target = target_of("regression", {"mean": 10.0, "scale": 2.0})
    labels = torch.tensor([8.0, 10.0, 14.0], dtype=torch.float64)
    logits = torch.tensor([[-1.0], [0.5], [2.0]])
    assert target.losses(logits, labels).tolist() == [0.0, 0.25, 0.0]
    predicted = target.predictions(logits)
    assert predicted.tolist() == [8.0, 11.0, 14.0]
    found = target.measure(predicted, labels, ())
    assert found["mae"] == pytest.approx(1 / 3)
    assert found["r2"] == pytest.approx(1 - 1 / (56 / 3))


def test_r2_of_rows_that_are_all_alike_is_left_out():
    labels = torch.tensor([3.0, 3.0], dtype=torch.float64)
    assert target_of("regression").measure(labels, labels, ()) == {"mae": 0.0}


def test_regression_deals_rows_by_quarters_of_the_train_rows():
    settings = target_of("regression").chosen([1.0, 2.0, 3.0, 4.0], DatasetSpec())
    assert settings["mean"] == 2.5 and settings["scale"] == pytest.approx(1.25**0.5)
    found = Regression(settings).strata([0.0, 1.9, 2.6, 99.0])
    assert found == ["lowest quarter", "second quarter", "third quarter", "highest quarter"]


def test_a_constant_label_is_refused():
    with pytest.raises(UserError, match="Every train row has 5 as label"):
        target_of("regression").chosen([5.0, 5.0], DatasetSpec())


def test_every_kind_of_target_says_what_it_measures():
    for name in registry.names("tasks"):
        target = registry.find("tasks", name)
        assert target.headline in target.metric_names
    assert {"loss", "accuracy", "f1", "r2", "mae", "c_index", "perplexity"} <= set(metric_names())


def test_another_package_s_target_is_one_class(monkeypatch):
    class Counts(Regression):
        headline, metric_names = "negative_mae", ("negative_mae",)

        def measure(self, predicted, labels, classes):
            return {"negative_mae": -super().measure(predicted, labels, classes)["mae"]}

    monkeypatch.setitem(registry.REGISTERED, ("tasks", "counts"), Counts)
    assert target_of("counts", {"mean": 0.0}).headline == "negative_mae"
    assert "negative_mae" in metric_names()
    assert metric_name([{"round": 1, "metric": "negative_mae", "test_negative_mae": -2.0}]) == "negative_mae"


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ([{"test_accuracy": 0.5}], "accuracy"),
        ([{"test_f1": 0.5, "test_accuracy": 0.5}], "f1"),
        ([{"test_mae": 2.0, "test_r2": -0.5}], "r2"),
        ([{"val_c_index": 0.5}], "c_index"),
        ([], "accuracy"),
    ],
)
def test_rounds_are_compared_by_the_target_s_own_metric(rows, name):
    assert metric_name(rows) == name
