"""What only a GPU can show: recorded and compiled steps give what plain ones give."""

import itertools
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from scipy.stats import kstest

from fedfrozen_app.audit.command import check_claims
from fedfrozen_app.config import compose_run
from fedfrozen_app.core import registry
from fedfrozen_app.core.digests import digests
from fedfrozen_app.data.federated import load_corpus
from fedfrozen_app.data.table import Table
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local import cohort, compiling, prefetch, private_sums, slot_memory, step_optimizer
from fedfrozen_app.local.algorithm import Algorithm
from fedfrozen_app.privacy import keystream
from fedfrozen_app.privacy.example_gradients import ExampleGradients, plain_loss
from fedfrozen_app.privacy.ghost import GhostClipping
from fedfrozen_app.privacy.noise import SecretNoise
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.concurrent_runs import WorkerPool, run_concurrently
from fedfrozen_app.server.base import PlannedFedAvg
from fedfrozen_app.vmap import factored_gradients, per_client_kernels
from fedfrozen_app.vmap.per_client_kernels import PerClientKernels
from tests.comparing import is_key_bias
from tests.conftest import SMALL, Run, same_bits
from tests.local.algorithms import Contrast, Normalised, OwnModel, head_first
from tests.privacy.bad_clients import reply_of, spoil_first_example
from tests.privacy.dpsgd_steps import parts, task_of
from tests.resuming import killed_before_checkpoint
from tests.server.wire import run_wired
from tests.strategies import dual

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module", autouse=True)
def own_compiled_code(tmp_path_factory):
    """Of several workers each fills a folder of its own: nothing depends on what another has compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


WORDS = ["device=cuda", "num_rounds=3", "checkpoint.keep=9", "client.local_steps=5", "num_clients=4"]
WORDS += ["client.lr_schedule=constant"]  # FedFrozen freezes after the first round
EAGER = ["runtime.runner=sequential", "runtime.capture=false"]


def distance(start, one, other):
    """Between two runs' ends, as a share of how far the first moved from its start; key biases left out."""
    end, twin = one.model_after(3), other.model_after(3)
    end = {name: value for name, value in end.items() if not is_key_bias(name)}
    return between(end, twin) / between(end, start)


def between(one, other):
    """Over the names of the first."""
    return float(sum((one[n].double() - other[n].double()).square().sum() for n in one) ** 0.5)


HOW = {
    "compiled": ["runtime.runner=cohort", "runtime.compile=true"],
    "recorded": ["runtime.runner=cohort", "runtime.compile=false"],
    "in turn": ["runtime.runner=sequential"],
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("client", ["client=adamw", "client=sgd"])
@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedfrozen"])
def test_compiled_and_recorded_steps_equal_plain_ones(train, strategy, client, how):
    words = [*WORDS, f"strategy={strategy}", client]
    plain = train(*words, *EAGER, folder="plain")
    quick = train(*words, *how, folder="quick")
    start = train(*words, "num_rounds=0", "strategy=fedavg", folder="start").model
    assert distance(start, plain, quick) <= 1e-3
    for row, twin in zip(plain.rows, quick.rows, strict=True):
        for key in ("bytes_up", "bytes_down", "bytes_up_by_role", "clients", "stage", "trained_params"):
            assert row.get(key) == twin.get(key), key


@pytest.mark.parametrize("killed", [2, 4])
def test_auto_resumes_to_the_bit_before_and_after_it_switches(train, monkeypatch, caplog, killed):
    monkeypatch.setattr(compiling, "SAVED", 1.0)  # it compiles with the second round
    words = [*WORDS, "num_rounds=4", "strategy=fedavg", "runtime.runner=cohort"]
    words += ["model.config.hidden_dropout_prob=0.1"]
    with caplog.at_level(logging.INFO, "fedfrozen_app"):
        whole = train(*words, folder="whole")
    assert "the step is compiled" in caplog.text and "could not be compiled" not in caplog.text
    with killed_before_checkpoint(monkeypatch, killed):
        train(*words, folder="broken")
    assert same_bits(whole.model, train(*words, folder="broken", resume=True).model)


@pytest.mark.parametrize("mode", ["compiled", "blocks", "captured"])
def test_attention_of_stacked_clients_in_bf16_is_fused(train, caplog, monkeypatch, mode):
    monkeypatch.setitem(compiling.MODES, "true", mode)
    words = [*WORDS, "num_rounds=1", "runtime.runner=cohort", "client.precision=bf16"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        train(*words, "runtime.compile=true", "eval_every=9")
    called = {event.key for event in seen.key_averages()}
    assert "aten::_scaled_dot_product_attention_math" not in called
    assert any(key.endswith(("_flash_attention", "_cudnn_attention")) for key in called)
    assert "could not use what was compiled" not in caplog.text


@pytest.mark.parametrize("compiled", ["true", "false"])
@pytest.mark.parametrize("strategy", ["fedavg", "fedprox"])
def test_bf16_of_stacked_clients_is_that_of_one_after_another(train, strategy, compiled):
    words = [*WORDS, f"strategy={strategy}", "client=sgd"]
    exact = train(*words, *EAGER, folder="exact")
    plain = train(*words, *EAGER, "client.precision=bf16", folder="plain")
    quick = ["client.precision=bf16", "runtime.runner=cohort", f"runtime.compile={compiled}"]
    stacked = train(*words, *quick, folder="stacked")
    start = train(*words, "num_rounds=0", "strategy=fedavg", folder="start").model
    assert distance(start, exact, stacked) <= 1.5 * distance(start, exact, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(3, 70), (2, 3, 1, 2)])
def test_kernels_for_own_weights_are_torch_s_own(lead, dtype):
    """Norms, biases and their gradients, for numbers of rows and columns that fill no tile."""
    from fedfrozen_app.vmap.row_kernels import Normalised, Shifted

    width, like = 200, {"device": "cuda", "dtype": dtype}
    rows = torch.randn(*lead, width, **like).requires_grad_()
    own = [torch.randn(lead[0], width, device="cuda").requires_grad_() for _ in range(2)]
    spread = [each.view(lead[0], *(1 for _ in lead[1:]), width) for each in own]
    gradients = torch.randn_like(rows)
    normal = torch.nn.functional.layer_norm(rows.double(), (width,), eps=1e-6)
    found = Normalised.apply(rows, *own, 1e-6, dtype)
    expected = normal * spread[0] + spread[1]
    close(found, expected, dtype)
    for one, other in zip(
        torch.autograd.grad(found, [rows, *own], gradients),
        torch.autograd.grad(expected, [rows, *own], gradients.double()),
        strict=True,
    ):
        close(one, other, dtype)
    bias = own[1].detach().to(dtype).requires_grad_()
    moved, usual = Shifted.apply(rows, bias), rows + bias.view(spread[1].shape)
    assert torch.equal(moved, usual)
    for one, other in zip(
        torch.autograd.grad(moved, [rows, bias], gradients),
        torch.autograd.grad(usual, [rows, bias], gradients),
        strict=True,
    ):
        close(one, other, dtype)


def close(found, expected, dtype, bound=None):
    assert found.dtype in (dtype, torch.float32)
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= (bound or (1e-5 if dtype is torch.float32 else 1e-2))


@pytest.mark.parametrize("channels, out, size, padding", [(3, 32, 3, 0), (32, 70, 3, 1), (6, 16, 5, 2)])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_kernels_for_own_convolutions_are_torch_s_own(channels, out, size, padding, precision):
    """In float32 as exact as float32 is, in TF32 as exact as that."""
    from fedfrozen_app.vmap.conv_kernels import Convolved

    pictures = torch.randn(2, 3, 9, 11, channels, device="cuda", requires_grad=True)
    kernels = torch.randn(2, out, size, size, channels, device="cuda", requires_grad=True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = Convolved.apply(pictures, kernels, (padding, padding))
        gradients = torch.randn_like(found)
        back = torch.autograd.grad(found, [pictures, kernels], gradients)
    finally:
        torch.set_float32_matmul_precision(before)
    exact = [each.detach().double().requires_grad_() for each in (pictures, kernels)]
    expected = torch.stack(
        [
            torch.nn.functional.conv2d(seen.permute(0, 3, 1, 2), kernel.permute(0, 3, 1, 2), padding=padding)
            for seen, kernel in zip(*exact, strict=True)
        ]
    ).movedim(2, -1)
    bound = 2e-6 if precision == "highest" else 2e-3
    close(found, expected, torch.float32, bound)
    for one, other in zip(back, torch.autograd.grad(expected, exact, gradients.double()), strict=True):
        close(one, other, torch.float32, bound)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("count, out, width", [(10, 128, 12544), (3, 72, 1000), (64, 40, 5000)])
def test_kernels_for_few_rows_are_torch_s_own(count, out, width, precision):
    from fedfrozen_app.vmap.factored_kernels import multiply, subtract_product

    whole = torch.randn(4, out * width + 64, device="cuda")
    weight = whole[:, : out * width].unflatten(1, (out, width))  # the clients' weights lie apart
    rows, gradients = torch.randn(4, count, width, device="cuda"), torch.randn(4, count, out, device="cuda")
    rates = torch.tensor([0.5, 2.0], device="cuda")
    each = rates.double().repeat_interleave(2).view(-1, 1, 1)
    expected = weight.double() - each * torch.bmm(gradients.double().mT, rows.double())
    product, rest = torch.bmm(rows.double(), weight.double().mT), whole[:, out * width :].clone()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        close(multiply(rows, weight), product, torch.float32, 2e-6 if precision == "highest" else 2e-3)
        subtract_product(weight, gradients, rows, rates)
    finally:
        torch.set_float32_matmul_precision(before)
    close(weight, expected, torch.float32, 2e-6 if precision == "highest" else 2e-3)
    assert torch.equal(whole[:, out * width :], rest)


@pytest.mark.parametrize("how", ["recorded", "compiled"])
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_stacked_convolutions_train_as_one_client_after_another(train, precision, how, monkeypatch):
    monkeypatch.setattr(factored_gradients, "LEAST", 1000)  # the gradients of its hidden layer stay factored
    words = [*WORDS, "strategy=fedavg", "model=simple_cnn", f"client.precision={precision}", "client=sgd"]
    words += ["dataset=digits", "dataset.limit=160", "partition.min_size=8", "+model.config.dropout=false"]
    words += ["client.momentum=0", "client.weight_decay=0"]
    plain = train(*words, *EAGER, folder="plain", small=False)
    taken = []
    monkeypatch.setattr(
        step_optimizer, "descend", lambda *given: (taken.append(given), factored_gradients.descend(*given))
    )
    quick = train(*words, *HOW[how], folder="quick", small=False)
    assert taken
    start = train(*words, "num_rounds=0", folder="start", small=False).model
    assert distance(start, plain, quick) <= (1e-3 if precision == "float32" else 2e-2)


def test_without_kernels_of_its_own_a_step_goes_on_and_says_so(train, monkeypatch, caplog):
    monkeypatch.setattr(per_client_kernels, "NARROW", 8)  # the small model's layers
    words = [*WORDS, "strategy=fedavg", "runtime.runner=cohort", "runtime.compile=false"]
    start = train(*words, "num_rounds=0", folder="start").model
    usual = train(*words, folder="usual")
    assert "could not be compiled" not in caplog.text and "runtime.compile" not in caplog.text

    def fail(*given):
        raise OSError("no compiler here")

    monkeypatch.setattr(per_client_kernels, "_compiling", lambda *given: Failed(fail))
    without = train(*words, folder="without")
    assert "could not be compiled" in caplog.text and "no compiler here" in caplog.text
    assert 0 < distance(start, usual, without) <= 1e-3  # another kernel rounds in another way


class Failed:
    def __init__(self, result):
        self.result = result


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
def test_masked_updates_from_a_gpu_give_the_plain_model(train, runner):
    words = [*WORDS, "strategy=fedfrozen", "client=sgd", f"runtime.runner={runner}"]
    plain = train(*words, folder="plain")
    masked = train(*words, "secure_aggregation=on", folder="masked")
    assert masked.rows[1]["secure"]["summed"] == 4
    start = train(*words, "num_rounds=0", "strategy=fedavg", folder="start").model
    assert distance(start, plain, masked) <= 1e-3


def test_a_model_s_digests_do_not_depend_on_where_it_lies():
    host = {"a": torch.randn(70_000, 3), "b": torch.randn(5, 7).bfloat16(), "c": torch.tensor(2.0)}
    assert digests({name: tensor.cuda() for name, tensor in host.items()}) == digests(host)


def test_the_same_seed_gives_the_same_bits(train):
    words = [*WORDS, "runtime.runner=sequential"]
    assert same_bits(train(*words, folder="one").model, train(*words, folder="other").model)


OVER_THE_WIRE = {
    "mean": ["strategy=fedfrozen", "strategy.warmup_rounds=1"],  # however many rounds there are
    "median": ["strategy=fedavg", "aggregation=median"],
    "layers of their own, pruned": ["strategy=safl", "strategy.top_k=1", "strategy.keep=0.5"],
    "private arrays": dual.WORDS,
}


@pytest.mark.parametrize("words", OVER_THE_WIRE.values(), ids=OVER_THE_WIRE)
def test_replies_that_come_as_bytes_give_what_references_give(train, tmp_path, words):
    words = [*words, "device=cuda", "runtime.runner=sequential", "num_rounds=2"]
    small = words[0] != "strategy=pfeddc"
    one = train(*words, folder="one", small=small)
    assert same_bits(one.model, run_wired(tmp_path, extra=words, small=small).model)


@pytest.mark.parametrize("words", OVER_THE_WIRE.values(), ids=OVER_THE_WIRE)
def test_what_comes_from_a_checkpoint_gives_what_never_left(train, words):
    words = [*words, "device=cuda", "runtime.runner=sequential", "client.lr_schedule=constant"]
    small = words[0] != "strategy=pfeddc"
    whole = train(*words, "num_rounds=3", folder="whole", small=small)
    train(*words, "num_rounds=2", folder="halves", small=small)
    halves = train(*words, "num_rounds=3", folder="halves", small=small, resume=True)
    assert same_bits(whole.model, halves.model)


def test_a_cohort_larger_than_the_free_memory_trains_in_parts_and_logs_it(train, caplog, monkeypatch):
    monkeypatch.setattr(slot_memory, "MEMORY_SHARE", 0.0)  # as if the card were full: one client at a time
    words = [*WORDS, "runtime.runner=cohort", "num_clients=10", "dataset.limit=400", "partition=iid"]
    with caplog.at_level(logging.INFO, "fedfrozen_app"):
        run = train(*words)
    assert "free memory holds 1 of the 10" in caplog.text and "trains 1 client at a time" in caplog.text
    assert run.rows[-1]["clients_ok"] == 10


@pytest.mark.parametrize("compiled", ["true", "false"])
def test_a_block_that_trains_while_another_is_added_up_changes_nothing(train, monkeypatch, compiled):
    own = [*WORDS, "strategy=fedavg", "num_clients=6", "runtime.max_block=2", "partition.alpha=0.3"]
    own += ["runtime.runner=cohort", f"runtime.compile={compiled}", "dataset.client_validation=0"]
    ahead = []
    may = cohort.CohortRunner._may_run_ahead
    monkeypatch.setattr(
        cohort.CohortRunner, "_may_run_ahead", lambda *given: ahead.append(may(*given)) or ahead[-1]
    )
    first = train(*own, folder="ahead")
    assert ahead == [True] * 3
    monkeypatch.setattr(cohort.CohortRunner, "_may_run_ahead", lambda *given: False)
    second = train(*own, folder="in turn")
    assert same_bits(first.model_after(3), second.model_after(3))
    for row, twin in zip(first.rows[1:], second.rows[1:], strict=True):
        assert row["train_loss"] == twin["train_loss"] and row["drift"] == twin["drift"]


@pytest.mark.parametrize("strategy", ["fedavg", "fedfrozen"])
@pytest.mark.parametrize("compiled", ["true", "false", "auto"])
def test_a_round_that_is_prefetched_while_another_is_closed_changes_nothing(
    train, monkeypatch, compiled, strategy
):
    """With dropout, frozen parameters, several blocks, and the model evaluated in between."""
    own = [*WORDS, f"strategy={strategy}", "num_clients=6", "runtime.max_block=2", "partition.alpha=0.3"]
    own += ["runtime.runner=cohort", f"runtime.compile={compiled}", "dataset.client_validation=0"]
    own += ["num_rounds=6", "eval_every=2", "model.config.hidden_dropout_prob=0.1"]
    served, real = [], prefetch.PrefetchedRound.serves
    watched = lambda *given: served.append(real(*given)) or served[-1]  # noqa: E731
    monkeypatch.setattr(prefetch.PrefetchedRound, "serves", watched)
    first = train(*own, folder="ahead")
    assert all(served) and len(served) >= 2  # not those for which a step is made or chosen first
    monkeypatch.setattr(cohort.CohortRunner, "can_prefetch", False)
    second = train(*own, folder="in turn")
    assert same_bits(first.model_after(6), second.model_after(6))
    for row, twin in zip(first.rows, second.rows, strict=True):
        assert {**row, "seconds": None} == {**twin, "seconds": None}


def test_private_gradients_are_those_of_the_host(train):
    model, inputs, labels = parts("bert")
    names = [name for name, _ in model.named_parameters()]
    _, host = ExampleGradients(model, task_of(model), names, plain_loss)(inputs, labels)
    model = model.to("cuda")
    moved = {key: value.to("cuda") for key, value in inputs.items()}
    _, found = ExampleGradients(model, task_of(model), names, plain_loss)(moved, labels.to("cuda"))
    for name in names:
        torch.testing.assert_close(found[name].cpu(), host[name], rtol=1e-4, atol=1e-7)
    for clipping in ("per_example", "ghost"):
        words = ["privacy=dp_sgd", f"privacy.clipping={clipping}", "strategy=safl", "strategy.top_k=1"]
        run = train(*WORDS, *words, folder=clipping)
        assert run.rows[-1]["clients_ok"] == 4
        assert 0 < run.rows[-1]["epsilon_max"] <= 8


def test_private_gradients_of_clients_by_kernels_are_those_of_each(monkeypatch):
    """In float32: the kernels' precision, where float64 goes without."""
    monkeypatch.setattr(per_client_kernels, "NARROW", 8)  # the small model's layers
    model, inputs, labels = parts("bert")
    model, names = model.float().to("cuda"), [name for name, _ in model.named_parameters()]
    given = {key: value.to("cuda").expand(2, *value.shape) for key, value in inputs.items()}
    rows = {name: torch.stack([value, value * 1.1]).detach() for name, value in model.named_parameters()}
    kernels = PerClientKernels(model, torch.device("cuda"), torch.float32)
    ways = partial(kernels.used, names)
    together = ExampleGradients(model, task_of(model), names, plain_loss, ways)
    losses, gradients = together.of_clients(rows, given, labels.to("cuda").expand(2, -1))
    assert any("row_kernels" in name for name in sys.modules)
    for client in range(2):
        model.load_state_dict({name: row[client] for name, row in rows.items()}, strict=False)
        alone = ExampleGradients(model, task_of(model), names, plain_loss)
        expected, by_name = alone({key: value[client] for key, value in given.items()}, labels.to("cuda"))
        torch.testing.assert_close(losses[client], expected, rtol=1e-5, atol=0)
        for name, gradient in by_name.items():  # keys' biases have none but what rounding makes
            torch.testing.assert_close(gradients[name][client], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("tokens, width, masked", [(20, 8, False), (17, 16, True), (128, 32, True)])
def test_the_kernel_for_short_attention_is_torch_s_own(tokens, width, masked, precision):
    from fedfrozen_app.vmap.attention_kernels import Attended

    shape = (3, tokens, 2, width)
    query, key, value, gradient = (torch.randn(shape, device="cuda").transpose(1, 2) for _ in range(4))
    given = [each.requires_grad_() for each in (query, key, value)]
    seen = torch.arange(tokens, device="cuda") < torch.tensor([[tokens], [5], [0]], device="cuda")
    mask = seen[:, None, None, :].expand(3, 1, tokens, tokens) if masked else None
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = Attended.apply(*given, mask, 0.3, 0.0)
        back = torch.autograd.grad(found, given, gradient)
    finally:
        torch.set_float32_matmul_precision(before)
    exact = [each.detach().double().requires_grad_() for each in given]
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, mask, scale=0.3)
    bound = 3e-6 if precision == "highest" else 3e-3
    close(found, expected, torch.float32, bound)
    for one, other in zip(back, torch.autograd.grad(expected, exact, gradient.double()), strict=True):
        close(one, other, torch.float32, bound)


def test_what_the_kernel_for_attention_drops_out_is_dropped_on_the_way_back_too():
    from fedfrozen_app.vmap.attention_kernels import Attended

    query, key, gradient = (torch.randn(8, 2, 32, 32, device="cuda") for _ in range(3))
    weights = torch.eye(32, device="cuda").expand(8, 2, 32, 32)  # as values, so that all of them show
    given = [each.clone().requires_grad_() for each in (query, key, weights)]
    found = Attended.apply(*given, None, 0.2, 0.3)
    kept = (found != 0).double()
    assert abs(float(kept.mean()) - 0.7) < 0.02
    assert (kept[0, 0] != kept[0, 1]).any() and (kept[0] != kept[1]).any()  # of each its own
    assert not torch.equal(found, Attended.apply(*given, None, 0.2, 0.3))
    exact = [each.detach().double().requires_grad_() for each in given]
    used = (0.2 * exact[0] @ exact[1].mT).softmax(dim=-1) * kept / 0.7
    expected = used @ exact[2]
    close(found, expected, torch.float32)
    for one, other in zip(
        torch.autograd.grad(found, given, gradient),
        torch.autograd.grad(expected, exact, gradient.double()),
        strict=True,
    ):
        close(one, other, torch.float32)


def test_kernels_for_private_steps_are_torch_s_own():
    """For numbers of columns and examples that fill no tile; and what counts nothing may be anything."""
    from fedfrozen_app.privacy import gpu_kernels

    words = torch.randint(-(2**63), 2**63 - 1, (3, 8 * 5001 + 2), device="cuda")[:, :-2]
    for count in (10001, 10002):
        found = torch.empty(3, 2 * count, dtype=torch.float64, device="cuda")[:, :count]
        gpu_kernels.gaussians(words, found, keystream.TERMS)
        assert (found - keystream._worked_out(words.clone())[:, :count]).abs().max() < 1e-12
    rows = torch.randn(2, 5, 70001, device="cuda")
    torch.testing.assert_close(gpu_kernels.norms(rows), rows.norm(dim=-1), rtol=1e-6, atol=0)
    factors, out = torch.rand(2, 5, device="cuda"), torch.ones(2, 70016, device="cuda")
    factors[0, 1] = 0
    expected = 1 + torch.einsum("cb,cbp->cp", factors.double(), rows.double())
    rows[0, 1] = torch.nan
    gpu_kernels.add_weighed(out, factors, rows)
    torch.testing.assert_close(out[:, :70001].double(), expected, rtol=1e-5, atol=1e-5)
    assert bool((out[:, 70001:] == 1).all())


@pytest.mark.parametrize(
    "words", [["strategy=fedavg"], ["strategy=fedavg", "adapter=lora", "adapter.rank=2"]]
)
def test_private_clients_together_are_one_after_another(train, words):
    own = [*WORDS, *words, "privacy=dp_sgd", "privacy.seeded_noise=true", "model.dtype=float64"]
    alone = train(*own, "runtime.runner=sequential", folder="alone")
    both = train(*own, "runtime.runner=cohort", folder="both")
    end, twin = alone.model_after(3), both.model_after(3)
    assert max(float((end[name] - twin[name]).abs().max()) for name in end) <= 1e-9
    assert alone.rows[-1]["epsilon"] == both.rows[-1]["epsilon"]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recorded_private_steps_are_those_step_by_step(train, monkeypatch, caplog, dropout):
    own = [*WORDS, "strategy=safl", "strategy.select=fixed", "strategy.top_k=1", "runtime.runner=cohort"]
    own += ["privacy=dp_sgd", "privacy.seeded_noise=true"]
    own += [f"model.config.hidden_dropout_prob={dropout}", "client.batch_size=32"]
    caplog.set_level(logging.INFO)
    ends = []
    for often in (10**9, 1):  # never recorded; from the second time on
        monkeypatch.setattr(private_sums, "OFTEN", often)
        ends.append(train(*own, folder=str(often)).model_after(3))
    assert "not recorded" not in caplog.text
    assert same_bits(*ends)


def test_a_private_step_that_cannot_be_recorded_is_taken_as_it_is(train, monkeypatch, caplog):
    monkeypatch.setattr(private_sums, "OFTEN", 1)
    norms = private_sums.norms_of

    def looks(*given):
        found = norms(*given)
        assert bool(torch.isfinite(found).all())  # waits for the device, which a recording cannot
        return found

    monkeypatch.setattr(private_sums, "norms_of", looks)
    caplog.set_level(logging.INFO)
    run = train(*WORDS, "strategy=fedavg", "privacy=dp_sgd", "runtime.runner=cohort")
    assert "Private steps are not recorded" in caplog.text and run.rows[-1]["clients_ok"] == 4
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    side, before = torch.cuda.Stream(), torch.cuda.memory_stats()["active_bytes.all.current"]
    for _ in range(3):  # what another stream has used is freed again
        torch.ones(2**20, device="cuda").record_stream(side)
        torch.cuda.synchronize()
    torch.ones(1, device="cuda")  # an allocation looks at what has become free
    assert torch.cuda.memory_stats()["active_bytes.all.current"] - before < 2**22


def test_private_steps_are_recorded_again_after_all_were_dropped(train, monkeypatch, caplog):
    """Clients that choose other layers in every round: few kinds of steps are kept."""
    monkeypatch.setattr(private_sums, "OFTEN", 1)
    monkeypatch.setattr(private_sums, "KEPT", 1)
    caplog.set_level(logging.INFO)
    words = ["strategy=safl", "strategy.select=random", "strategy.top_k=1", "privacy=dp_sgd", "num_rounds=6"]
    run = train(*WORDS, *words, "runtime.runner=cohort")
    assert "not recorded" not in caplog.text and run.rows[-1]["clients_ok"] == 4


def test_an_example_that_is_not_finite_gives_nothing_in_a_recorded_step(train, monkeypatch):
    monkeypatch.setattr(private_sums, "OFTEN", 1)
    spoil_first_example(monkeypatch)
    run = train(*WORDS, "strategy=fedavg", "privacy=dp_sgd", "runtime.runner=cohort")
    for arrays in (run.model_after(3), *(reply_of(run, client) for client in "0123")):
        assert arrays and all(bool(torch.isfinite(value).all()) for value in arrays.values())


def test_ghost_clipping_gives_the_host_s_sums():
    sums = []
    for device in ("cpu", "cuda"):
        model, inputs, labels = parts("bert")
        model = model.to(device)
        names = [name for name, _ in model.named_parameters() if "embeddings" not in name]
        table = Table({key: value.to(device) for key, value in inputs.items()}, labels.to(device))
        parameters = {name: model.get_parameter(name) for name in names}
        GhostClipping(model, task_of(model), names, 0.1).load(
            table, torch.arange(len(labels), device=device), parameters
        )
        sums.append({name: value.grad.cpu() for name, value in parameters.items()})
    for name, value in sums[0].items():
        torch.testing.assert_close(sums[1][name], value, rtol=1e-4, atol=1e-7)


def test_secret_noise_on_a_gpu_is_gaussian_and_new_every_time():
    sums = torch.full((300, 500), 0.25, device="cuda")
    first, second = (SecretNoise(sums.device).added_to(sums, 2.0) for _ in range(2))
    assert first.is_cuda and not torch.equal(first, second)
    assert kstest(((first - sums) / 2.0).flatten().cpu().numpy(), "norm").pvalue > 1e-6


def test_noise_that_threads_draw_for_a_gpu_is_that_of_the_host(monkeypatch):
    """From the same keys, in many pieces: none is written over before it has been sent."""
    monkeypatch.setattr(keystream, "GPU_CHUNK", keystream.CHUNK)
    found = []
    for device in ("cpu", "cuda"):
        keys = itertools.count()
        monkeypatch.setattr(
            keystream.secrets, "token_bytes", lambda size, keys=keys: bytes([next(keys)]) * size
        )
        sources = [SecretNoise(torch.device(device)) for _ in range(2)]
        like = torch.empty(20 * keystream.CHUNK + 7, device=device)
        with ThreadPoolExecutor(6) as workers:
            found.append(SecretNoise.standards(sources, like, workers, 6).cpu())
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_a_watched_client_on_a_gpu_passes(train):
    words = [
        "strategy=fedavg",
        "privacy=dp_sgd",
        "privacy.audited='0'",
        "privacy.canaries=150",
        "privacy.epsilon=1",
    ]
    run = train("device=cuda", "num_rounds=2", "model.config.hidden_dropout_prob=0.2", *words)
    (claim,) = check_claims(run.folder)
    assert claim["verdict"] == "pass", claim["checks"]


@pytest.mark.parametrize("compile", ["true", "false"])
@pytest.mark.parametrize("modalities", ["both", "text"])
def test_stacked_prompts_and_private_rows_equal_one_client_after_another(train, modalities, compile):
    """pFedDC: global prompts, and what each client keeps for itself, within 1e-3 of how far they moved."""
    words = [*dual.WORDS, "device=cuda", "num_rounds=3", "client.local_steps=5", "client.fusion_lr=0.3"]
    words += [f"strategy.modalities={modalities}", "participation=0.7"]  # each misses some round
    plain = train(*words, *EAGER, folder="plain", small=False)
    quick = train(*words, "runtime.runner=cohort", f"runtime.compile={compile}", folder="quick", small=False)
    start = train(*words, "num_rounds=0", folder="start", small=False).model
    one, other = ({"": run.model_after(3)} | private_parts(run, 3) for run in (plain, quick))
    assert set(one) == set(other) == {"", "0", "1", "2"}
    for client, arrays in one.items():
        moved = between(arrays, start)
        assert moved > 0 and between(arrays, other[client]) <= 1e-3 * moved, client
    for row, twin in zip(plain.rows[1:], quick.rows[1:], strict=True):
        assert row["clients"] == twin["clients"] and row["bytes_up_by_role"] == twin["bytes_up_by_role"]
        assert twin["clients_failed"] == 0
        for tower in ("text",) if modalities == "text" else ("text", "vision"):
            gap = row[f"fusion_gap_{tower}"]
            assert gap > 0 and twin[f"fusion_gap_{tower}"] == pytest.approx(gap, rel=1e-2)


def test_private_rows_go_on_from_a_checkpoint(train):
    words = [*dual.WORDS, "device=cuda", "runtime.runner=cohort"]
    train(*words, "num_rounds=1", small=False)
    run = train(*words, small=False, resume=True)
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 3]


def private_parts(run, server_round):
    return checkpoint.read(run.folder / "checkpoints" / str(server_round)).clients


@pytest.mark.parametrize("runner", ["cohort", "sequential"])
@pytest.mark.parametrize("algorithm", [OwnModel, Contrast, Normalised, Algorithm])
def test_arrays_of_an_algorithm_and_phases_in_a_recorded_step(train, monkeypatch, algorithm, runner):
    """The plain algorithm here trains in phases, with a head of each client's own."""

    class Own(PlannedFedAvg):
        def plan(self, server_round):
            plan = super().plan(server_round)
            return head_first(plan, self.federation.roles) if algorithm is Algorithm else plan

    Own.algorithm = name = f"own {algorithm.__name__} {runner}"
    monkeypatch.setitem(registry.REGISTERED, ("strategies", "fedavg"), Own)
    monkeypatch.setitem(registry.REGISTERED, ("algorithms", name), algorithm)
    words = [*WORDS, "strategy=fedavg", "client=sgd", "client.momentum=0"]
    plain = train(*words, *EAGER, folder="plain")
    compiled = ["runtime.compile=true"] if runner == "cohort" else []  # in turn, steps are recorded
    quick = train(*words, f"runtime.runner={runner}", *compiled, folder="quick")
    start = train(*words, "num_rounds=0", folder="start").model
    assert distance(start, plain, quick) <= 1e-3
    one, other = (checkpoint.newest(run.folder).clients for run in (plain, quick))
    assert one.keys() == other.keys() and all(one[who].keys() == other[who].keys() for who in one)
    for who, arrays in one.items():
        size = sum(float(value.square().sum()) for value in arrays.values()) ** 0.5
        assert between({n: v for n, v in arrays.items() if not is_key_bias(n)}, other[who]) <= 1e-3 * size


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("client", ["client=adamw", "client=sgd"])
def test_runs_side_by_side_equal_runs_alone(train, tmp_path, client, compiled):
    """Three seeds at other rates, each with its own frozen kernel; one of them ends a round sooner."""
    words = [*SMALL, *WORDS, client, "runtime.runner=cohort", f"runtime.compile={compiled}"]
    each = [[*words, f"seed={n}", f"client.lr={lr}"] for n, lr in enumerate((0.001, 0.002, 0.003))]
    each.append([*words, "seed=3", "num_rounds=2"])
    alone = [train(*own, folder=f"alone{n}", small=False) for n, own in enumerate(each)]
    jobs = []
    for number, own in enumerate(each):
        composed = compose_run(own)
        jobs.append(Job(composed, tmp_path / f"stacked{number}"))
    found = run_concurrently(jobs, WorkerPool(load_corpus(jobs[0].config), 4))
    assert [outcome["status"] for outcome in found] == ["completed"] * 4
    for number, one in enumerate(alone[:3]):
        start = train(*each[number], "num_rounds=0", folder=f"start{number}", small=False).model
        assert distance(start, one, Run(jobs[number].folder)) <= 1e-3


def test_compiled_steps_have_the_same_bits_wherever_they_are_compiled(tmp_path):
    """Two processes at once, each with an empty folder. A compiler that tries several ways to sum and keeps
    the quickest would keep another in each."""
    command = [sys.executable, "-m", "fedfrozen_app", *WORDS, "runtime.compile=true"]
    folders = [tmp_path / "one", tmp_path / "other"]
    begun = []
    for folder in folders:
        places = {name: str(folder / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        words = [*command, f"output_dir={folder / 'run'}"]
        begun.append(subprocess.Popen(words, env={**os.environ, **places}, cwd=tmp_path))
    assert [process.wait(timeout=300) for process in begun] == [0, 0]
    one, other = (Run(folder / "run").model for folder in folders)
    assert same_bits(one, other)
