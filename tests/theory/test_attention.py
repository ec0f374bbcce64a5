"""The formulas against other ways to the same numbers: finite differences, autograd, direct solves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.theory.attention_loss import FEATURE_MAPS, Data, attend, gradients, loss, moments
from fedfrozen_app.theory.descent import freeze, measure, moments_along, objective, walk
from fedfrozen_app.theory.problem import Setting, make

TINY = {"sequences": 3, "tokens": 5, "width": 4, "rank": 2, "outputs": 3}


def plain_attention(inputs, kernel, feature_map):
    """Z as the formula reads, of one client's (d, tokens, n): the sequences one by one, with autograd."""
    phi = {"identity": lambda x: x, "relu": torch.relu, "elu+1": lambda x: torch.nn.functional.elu(x) + 1}
    rank, length = kernel.shape[-1] // 2, inputs.shape[1]
    found = []
    for h in inputs.permute(2, 1, 0):  # (tokens, d)
        if feature_map == "softmax":
            scores = (h @ kernel[:, :rank]) @ (h @ kernel[:, rank:]).T
            found.append(torch.softmax(scores / rank**0.5, dim=-1) @ h)
            continue
        q, k = (phi[feature_map](h @ part) for part in (kernel[:, :rank], kernel[:, rank:]))
        found.append(q @ (k.T @ h) / (length * rank**0.5))
    return torch.stack(found)  # (n, tokens, d)


def plain_loss(data, client, kernel, value):
    z = plain_attention(data.inputs[client], kernel, data.feature_map)
    residual = z @ value - data.targets[client].permute(2, 1, 0)
    return residual.square().sum() / (2 * data.tokens)


def point(feature_map, seed=0):
    problem = make(Setting(clients=2, rounds=1, feature_map=feature_map, **TINY), (seed,))
    spread = torch.Generator().manual_seed(seed)
    kernel = problem.kernel.repeat(2, 1, 1) + torch.randn(2, 4, 4, generator=spread, dtype=torch.float64)
    value = problem.value.repeat(2, 1, 1) + torch.randn(2, 4, 3, generator=spread, dtype=torch.float64)
    return problem.data, kernel, value


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_gradients_against_autograd(feature_map):
    data, kernel, value = point(feature_map)
    to_kernel, to_value = gradients(data, kernel, value)
    losses = loss(data, kernel, value)
    for client in range(2):
        own = [part[client].clone().requires_grad_(True) for part in (kernel, value)]
        expected = plain_loss(data, client, *own)
        torch.testing.assert_close(losses[client], expected.detach(), rtol=1e-12, atol=1e-14)
        slopes = torch.autograd.grad(expected, own)
        torch.testing.assert_close(to_kernel[client], slopes[0], rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(to_value[client], slopes[1], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_gradients_against_finite_differences(feature_map):
    data, kernel, value = point(feature_map, seed=1)
    step = 1e-6
    for which, found in enumerate(gradients(data, kernel, value)):
        for place in ((0, 0), (1, 2), (3, 1)):
            shifted = []
            for sign in (1, -1):
                parts = [kernel.clone(), value.clone()]
                parts[which][:, place[0], place[1]] += sign * step
                shifted.append(loss(data, *parts))
            numeric = (shifted[0] - shifted[1]) / (2 * step)
            torch.testing.assert_close(found[:, place[0], place[1]], numeric, rtol=1e-5, atol=1e-8)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(FEATURE_MAPS), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99)
)
def test_any_shape_attends_as_the_formula_reads(feature_map, clients, count, length, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(clients, 3, length, count, generator=generator, dtype=torch.float64)
    kernel = torch.randn(clients, 3, 4, generator=generator, dtype=torch.float64)
    data = Data(inputs, torch.zeros(clients, 2, length, count, dtype=torch.float64), feature_map)
    for client in range(clients):
        expected = plain_attention(inputs[client], kernel[client], feature_map).permute(2, 1, 0).flatten(1)
        torch.testing.assert_close(attend(data, kernel)[client], expected, rtol=1e-10, atol=1e-12)


def test_the_profile_is_a_direct_solve_and_its_slope_a_derivative():
    problem = make(Setting(clients=3, rounds=2, local_steps=3, **TINY), (0, 1))
    walked, ridge = walk(problem), problem.setting.ridge
    measures = measure(problem, walked)
    kernel = walked.kernel[1, 2]

    def best(kernel):
        """min over W of F, as ordinary least squares: the ridge as extra rows."""
        rows, targets = [], []
        for client in range(3, 6):  # the second seed's
            z = plain_attention(problem.data.inputs[client], kernel, "identity").flatten(0, 1)
            y = problem.data.targets[client].permute(2, 1, 0).flatten(0, 1)
            weight = (3 * len(z)) ** -0.5
            rows.append(z * weight)
            targets.append(y * weight)
        rows.append(ridge**0.5 * torch.eye(4, dtype=torch.float64))
        targets.append(torch.zeros(4, 3, dtype=torch.float64))
        stacked, wanted = torch.cat(rows), torch.cat(targets)
        value = torch.linalg.lstsq(stacked, wanted).solution
        return (stacked @ value - wanted).square().sum() / 2 + ridge / 2 * kernel.square().sum(), value

    expected, value = best(kernel)
    torch.testing.assert_close(measures.profile[1, 2], expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(measures.value_gap[1, 2], (walked.value[1, 2] - value).norm())
    slope = torch.zeros_like(kernel)
    for row in range(4):
        for column in range(4):
            step = torch.zeros_like(kernel)
            step[row, column] = 1e-5
            slope[row, column] = (best(kernel + step)[0] - best(kernel - step)[0]) / 2e-5
    torch.testing.assert_close(measures.slope[1, 2], slope.norm(), rtol=1e-5, atol=0)
    assert (measures.profile <= measures.objective + 1e-12).all()


@pytest.mark.parametrize(
    "other",
    [{}, {"participation": 0.5}, {"lr_schedule": "cosine", "lr": 0.2}, {"feature_map": "softmax", "lr": 0.2}],
)
def test_the_frozen_stage_in_closed_form_is_its_steps_one_by_one(other):
    setting = Setting(clients=4, rounds=6, local_steps=7, **other, **TINY)
    problem = make(setting, (0, 1, 2))
    walked = walk(problem)
    curves = freeze(problem, walked, [0, 2, 6])
    for place, after in enumerate([0, 2, 6]):
        tail = walk(problem, start=after, origin=walked, train="value")
        assert torch.equal(tail.kernel[:, -1], walked.kernel[:, after])
        torch.testing.assert_close(curves[:, place, after:], objective(problem, tail), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(curves[:, place, :after], objective(problem, walked)[:, :after])


def test_one_client_with_exact_steps_reaches_the_closed_form_optimum():
    setting = Setting(clients=1, rounds=6, local_steps=50, lr=0.5, ridge=0.2, **TINY)
    problem = make(setting, (0, 1))
    start = walk(problem, until=0)
    frozen = walk(problem, origin=start, train="value")
    assert frozen.kernel_drift.max() == 0 and frozen.value_drift.max() < 1e-25
    best = moments_along(problem, frozen.kernel[:, -1:]).mean(2).best_value(setting.ridge)
    torch.testing.assert_close(frozen.value[:, -1:], best, rtol=1e-6, atol=1e-8)
    gaps = measure(problem, frozen)
    torch.testing.assert_close(gaps.objective[:, -1], gaps.profile[:, -1], rtol=1e-9, atol=0)


def test_moments_hold_all_that_the_value_block_needs():
    data, kernel, value = point("elu+1")
    torch.testing.assert_close(moments(data, kernel).loss(value), loss(data, kernel, value))


@pytest.mark.parametrize(
    "bad",
    [
        {"feature_map": "exp"},
        {"participation": 0},
        {"clients": 0},
        {"lr": 0},
        {"heterogeneity": -1},
        {"lr_schedule": "step"},
        {"lr_final": 0},
        {"value_spread": -0.1},
    ],
)
def test_settings_that_cannot_work(bad):
    with pytest.raises(UserError):
        Setting(**bad)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_the_truth_attends_as_the_model_does(feature_map):
    """Without noise, with clients alike, the true blocks explain the targets up to a client's scale."""
    setting = Setting(heterogeneity=0, noise=0, clients=2, feature_map=feature_map, **TINY)
    data = make(setting, (5,)).data
    truth = np.random.default_rng(5)
    query, key, value = (torch.from_numpy(truth.normal(size=(4, size)) / 2) for size in (2, 2, 3))
    z = attend(data, torch.cat([query, key], dim=1).repeat(2, 1, 1))
    outputs = torch.bmm(value.mT.repeat(2, 1, 1), z)
    scale = outputs.square().mean((1, 2), keepdim=True).sqrt()
    torch.testing.assert_close(outputs / scale, data.targets.flatten(2), rtol=1e-10, atol=1e-12)


# Settings ------------------------------------------------------------------------------------------------

# Final F of two seeds, frozen after 2 of 4 rounds, as they were before there were dials and schedules.
RECORDED = {
    "identity": ("0x1.01098a8ef3426p+1", "0x1.04250e9f82714p+1"),
    "elu+1": ("0x1.5dd1638b5eaebp+0", "0x1.2f37db92faa90p+0"),
    "relu": ("0x1.091d85f5710c9p+1", "0x1.03fedf403354ap+1"),
}


@pytest.mark.parametrize("feature_map", RECORDED)
def test_old_settings_are_what_they_were(feature_map):
    setting = Setting(rounds=4, local_steps=3, feature_map=feature_map, participation=0.5)
    problem = make(setting, (0, 1))
    found = freeze(problem, walk(problem), [2])[:, 0, -1].tolist()
    # Other processors may sum in another order; another draw would be far off.
    assert found == pytest.approx([float.fromhex(text) for text in RECORDED[feature_map]], rel=1e-12)


def test_a_dial_moves_its_part_alone():
    alike = Setting(heterogeneity=0, clients=3, noise=0, **TINY)
    before = make(alike, (2,)).data
    for dial in ("kernel_spread", "value_spread"):
        after = make(replace(alike, **{dial: 0.7}), (2,)).data
        assert torch.equal(before.inputs, after.inputs) and not torch.allclose(before.targets, after.targets)
    moved = make(replace(alike, input_spread=0.5), (2,)).data
    assert not torch.allclose(before.inputs, moved.inputs)
    apart = Setting(heterogeneity=1, clients=3, **TINY)
    same = replace(apart, heterogeneity=9, kernel_spread=0.7, value_spread=0, input_spread=0.5)
    assert torch.equal(make(apart, (2,)).data.targets, make(same, (2,)).data.targets)


def test_the_values_dial_by_hand():
    """Under kernels alike a client's targets, up to their scale, follow from its own shift of the values."""
    setting = Setting(heterogeneity=0, value_spread=0.6, clients=2, noise=0, **TINY)
    data = make(setting, (5,)).data
    truth, shifts = np.random.default_rng(5), np.random.default_rng(5 + 277)
    query, key, value = (torch.from_numpy(truth.normal(size=(4, size)) / 2) for size in (2, 2, 3))
    z = attend(data, torch.cat([query, key], dim=1).repeat(2, 1, 1))
    for client in range(2):
        own = value + 0.6 / 2 * torch.from_numpy(shifts.normal(size=(4, 3)))
        outputs = own.mT @ z[client]
        outputs /= outputs.square().mean().sqrt()
        torch.testing.assert_close(outputs, data.targets[client].flatten(1), rtol=1e-10, atol=1e-12)


def test_a_cosine_goes_from_the_rate_to_a_share_of_it():
    setting = Setting(rounds=5, lr=0.2, lr_schedule="cosine", lr_final=0.1)
    assert [setting.rate(n) for n in (0, 2, 4)] == pytest.approx([0.2, 0.11, 0.02])
    assert replace(setting, rounds=1).rate(0) == 0.2
    assert {replace(setting, lr_schedule="constant").rate(n) for n in range(5)} == {0.2}
