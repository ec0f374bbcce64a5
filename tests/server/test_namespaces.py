"""Arrays beside parameters in the mean: by hand, for replies that come alone and for the rows of a block."""

import math

import pytest
import torch

from fedfrozen_app.config import AggregationConfig
from fedfrozen_app.exchange.block import Block, Layout
from fedfrozen_app.exchange.names import PARAMETERS
from fedfrozen_app.server.aggregate import RunningMean
from fedfrozen_app.server.norms import NormGate
from fedfrozen_app.server.robust import make_aggregator

MODEL = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
# Two clients with 1 and 3 examples, whose updates of w are (1, 0) and (3, 4).
SENT = [
    ({"w": [2.0, 2.0], "dc/w": [4.0, -8.0], "h/w": [1.0, 0.0]}, 1),
    ({"w": [4.0, 6.0], "dc/w": [8.0, 0.0], "h/w": [5.0, 8.0]}, 3),
]


def replies(how, sent=SENT):
    tensors = [({n: torch.tensor(v, dtype=torch.float64) for n, v in own.items()}, k) for own, k in sent]
    if how == "single":
        return tensors
    layout = Layout.of(tensors[0][0])
    base = {name: MODEL.get(name, torch.zeros(2, dtype=torch.float64)) for name in layout.names}
    values = torch.stack([layout.flatten(own) for own, _ in tensors])
    block = Block(("0", "1"), layout, layout.flatten(base), values, [k for _, k in tensors])
    return [(block.slice(number), k) for number, (_, k) in enumerate(tensors)]


def fold(how, sent=SENT, **options):
    mean = RunningMean(MODEL, lambda name: "rest", **options)
    return mean, [mean.add(arrays, float(k)) for arrays, k in replies(how, sent)]


def told(extra):
    return {space: {name: value.tolist() for name, value in own.items()} for space, own in extra.items()}


@pytest.mark.parametrize("how", ["single", "block"])
def test_by_examples_and_equally_by_hand(how):
    mean, refused = fold(how, equal=("dc",))
    update = mean.finish()
    assert refused == [None, None] and update.replies == 2
    assert update.model["w"].tolist() == [(1 + 3 * 3) / 4, (0 + 3 * 4) / 4]
    assert told(update.extra) == {
        "dc": {"w": [(4 + 8) / 2, (-8 + 0) / 2]},  # every reply counts alike
        "h": {"w": [(1 + 3 * 5) / 4, (0 + 3 * 8) / 4]},  # by examples
    }
    # Σ wᵢ‖uᵢ‖² = 1/4·1 + 3/4·25 = 19 and ‖ū‖² = 2.5² + 3²: of w alone.
    assert update.drift["rest"]["mean_update"] == pytest.approx(math.sqrt(15.25))
    assert update.drift["rest"]["rms"] == pytest.approx(math.sqrt(19 - 15.25))


@pytest.mark.parametrize("how", ["single", "block"])
def test_parameters_may_count_alike_too(how):
    update = fold(how, equal=(PARAMETERS,))[0].finish()
    assert update.model["w"].tolist() == [(1 + 3) / 2, (0 + 4) / 2]
    assert told(update.extra)["h"] == {"w": [(1 + 3 * 5) / 4, (0 + 3 * 8) / 4]}  # by examples as before
    # Σ ‖uᵢ‖²/2 = (1 + 25)/2 = 13 and ‖ū‖² = 2² + 2²
    assert update.drift["rest"]["mean_update"] == pytest.approx(math.sqrt(8))
    assert update.drift["rest"]["rms"] == pytest.approx(math.sqrt(13 - 8))


def test_several_blocks_and_a_reply_alone_are_one_mean():
    mean, _ = fold("block", equal=("dc",))
    for arrays, k in (*replies("block"), *replies("single")):
        assert mean.add(arrays, float(k)) is None
    update, once = mean.finish(), fold("single", equal=("dc",))[0].finish()
    assert update.replies == 6 and told(update.extra) == told(once.extra)
    assert torch.equal(update.model["w"], once.model["w"])


def test_what_a_client_sent_stays_as_it_keeps_it():
    mean = RunningMean(MODEL, lambda name: "rest")
    kept = torch.tensor([4.0, -8.0], dtype=torch.float64)
    mean.add({"c/w": kept}, 3.0)
    mean.add({"c/w": kept.clone()}, 1.0)
    assert told(mean.finish().extra) == {"c": {"w": [4.0, -8.0]}} and kept.tolist() == [4.0, -8.0]


@pytest.mark.parametrize("how", ["single", "block"])
def test_one_that_is_not_finite_is_refused_whole(how):
    spoiled = [SENT[0], ({**SENT[1][0], "dc/w": [math.nan, 0.0]}, 3)]
    mean, refused = fold(how, spoiled, equal=("dc",))
    assert refused[0] is None and "not finite in dc/w" in refused[1]
    update = mean.finish()
    assert update.replies == 1 and update.model["w"].tolist() == [1.0, 0.0]
    assert told(update.extra) == {"dc": {"w": [4.0, -8.0]}, "h": {"w": [1.0, 0.0]}}


@pytest.mark.parametrize("how", ["single", "block"])
def test_far_out_goes_by_the_parameters(how):
    gate = NormGate(far_out=10, median=1.0)
    large = [({**own, "dc/w": [1e6, 1e6]}, k) for own, k in SENT]
    assert fold(how, large, gate=gate)[1] == [None, None]
    assert gate.median() == 3.0  # the median of 1 and 5


def test_filled_with_zero_by_those_who_did_not_send():
    half = [SENT[0], ({"w": [4.0, 6.0]}, 3)]
    update = fold("single", half, zero_fill=True, equal=("dc",))[0].finish()
    assert told(update.extra) == {"dc": {"w": [2.0, -4.0]}, "h": {"w": [0.25, 0.0]}}


@pytest.mark.parametrize(
    ("rule", "dc"), [("median", [3.0]), ("trimmed_mean", [3.0]), ("krum", [(1 + 2 + 3 + 4) / 4])]
)
def test_robust_rules_hold_for_them_too(rule, dc):
    model = {"w": torch.zeros(1)}
    how = AggregationConfig(rule, malicious=1, trim=0.4)
    mean = make_aggregator(how, model, lambda name: None, None, equal=("dc",))
    for value, poison in ((1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (4.0, 4.0), (1e6, 1e9)):
        mean.add({"w": torch.tensor([value]), "dc/w": torch.tensor([poison])}, value)
    update = mean.finish()
    assert told(update.extra) == {"dc": {"w": dc}} and update.replies == 5


def test_krum_s_distances_are_of_parameters():
    """The dc of honest clients may lie apart."""
    mean = make_aggregator(
        AggregationConfig("krum", malicious=1), {"w": torch.zeros(1)}, lambda name: None, None, equal=("dc",)
    )
    for value, dc in ((1.0, 1e3), (1.1, 0.0), (1.2, -1e3), (50.0, 1.0)):
        mean.add({"w": torch.tensor([value]), "dc/w": torch.tensor([dc])}, 1.0)
    assert told(mean.finish().extra) == {"dc": {"w": [0.0]}}
