"""FedPGP and FedOTP beside pFedDC, with a tiny random CLIP in float64: rounds of two clients by hand, what
travels, limits in which they are something else, both runners, resuming; and novel classes for all prompt
methods. pFedMoAP has a file of its own."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from clients.fedotp import partial_plan
from fedfrozen_app.__main__ import run as command
from fedfrozen_app.adapters.dual import DualEncoder
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local.model_evaluation import evaluate_novel, evaluate_test
from tests.adapters.dual_encoders import clip, dinov2_bert
from tests.conftest import same_bits, worker_of
from tests.strategies.dual import TEXT_TOKENS, TEXT_WIDTH
from tests.strategies.prompts_by_hand import BY_HAND, COMMON, LR, ByHand

PGP = ["strategy=fedpgp", *COMMON, "strategy.rank=2"]
OTP = ["strategy=fedotp", *COMMON]
BOTH = [pytest.param(PGP, id="fedpgp", marks=pytest.mark.slow), pytest.param(OTP, id="fedotp")]
METHODS = pytest.mark.parametrize("words", BOTH)
BY_HAND += ["client.momentum=0", "client.weight_decay=0", f"client.lr={LR}", "dataset.client_validation=0"]


def averaged(run, stepped, name):
    """p ← Σ nᵢ pᵢ / Σ nᵢ over those who took part."""
    sizes = {client: rows for client, (rows, _) in stepped.items()}
    total = sum(sizes.values())
    return sum(sizes[client] / total * arrays[name] for client, (_, arrays) in stepped.items())


def two_of_three(train, words):
    """A run of one round, the two clients that took part, and the model as they all begin."""
    run = train(*words, small=False)
    cohort = run.rows[1]["clients"]
    assert len(cohort) == 2 and run.rows[1]["clients_failed"] == 0
    return run, cohort, worker_of(*words)


def test_fedpgp_by_hand(train):
    """p = p_G + UV; cross-entropy + μ · mean −log(e^(a/τ)/(e^(a/τ) + e^(b/τ))), one step for two of three."""
    words = [*PGP, *BY_HAND, "strategy.mu=0.7", "strategy.temperature=0.3"]
    run, cohort, worker = two_of_three(train, words)
    hand, stepped = ByHand(worker), {}
    for client in cohort:
        start = {name: value.clone().requires_grad_(True) for name, value in worker.initial().items()}
        shared, u, v = (start[f"prompts.text.{part}"][0] for part in ("global", "u", "v"))
        own, common, plain = hand.texts(shared + u @ v), hand.texts(shared), hand.texts()
        pixels, labels = hand.batch(client)
        logits = hand.scale * hand.hidden(pixels)[:, 0] @ own.T
        near, far = ((common * other).sum(dim=1) / 0.3 for other in (plain, own))
        contrast = -(near.exp() / (near.exp() + far.exp())).log().mean()
        (functional.cross_entropy(logits, labels) + 0.7 * contrast).backward()
        assert all(value.grad.abs().max() > 1e-7 for value in start.values())
        moved = {name: value.detach() - LR * value.grad for name, value in start.items()}
        stepped[client] = (len(labels), moved)
    torch.testing.assert_close(
        run.model["prompts.text.global"], averaged(run, stepped, "prompts.text.global"), rtol=0, atol=1e-9
    )
    kept = checkpoint.read(run.folder / "checkpoints" / "1").clients
    assert set(kept) == set(cohort)
    for client in cohort:
        assert set(kept[client]) == {"prompts.text.u", "prompts.text.v"}
        for name, value in kept[client].items():
            torch.testing.assert_close(value, stepped[client][1][name], rtol=0, atol=1e-9)


def scaled_by_hand(similarity, mass, epsilon, iterations):
    """One picture and class, number by number: T = diag(u) K diag(v)."""
    patches, texts = similarity.shape
    kernel = np.exp(-(1 - similarity) / epsilon)
    u, v = np.ones(patches), np.ones(texts)
    for _ in range(iterations):
        for m in range(patches):
            u[m] = min((1 / patches) / sum(kernel[m, n] * v[n] for n in range(texts)), 1.0)
        for n in range(texts):
            v[n] = (mass / texts) / sum(kernel[m, n] * u[m] for m in range(patches))
    return np.array([[u[m] * kernel[m, n] * v[n] for n in range(texts)] for m in range(patches)])


def test_fedotp_by_hand(train):
    """Scores are exp(s) Σ T ⊙ S with T held; one step of two of three clients."""
    words = [*OTP, *BY_HAND, "strategy.mass=0.6", "strategy.epsilon=0.2", "strategy.iterations=7"]
    run, cohort, worker = two_of_three(train, words)
    hand, stepped = ByHand(worker), {}
    for client in cohort:
        start = {name: value.clone().requires_grad_(True) for name, value in worker.initial().items()}
        texts = torch.stack([hand.texts(start[f"prompts.text.{part}"][0]) for part in ("global", "local")])
        pixels, labels = hand.batch(client)
        patches = hand.hidden(pixels)[:, 1:]
        scores = []
        for row in patches:  # (patches, width)
            each = [row @ texts[:, number].T for number in range(len(hand.classes))]  # (patches, texts)
            plans = [torch.from_numpy(scaled_by_hand(s.detach().numpy(), 0.6, 0.2, 7)) for s in each]
            scores.append(torch.stack([(plan * s).sum() for plan, s in zip(plans, each, strict=True)]))
        functional.cross_entropy(hand.scale * torch.stack(scores), labels).backward()
        assert all(value.grad.abs().max() > 1e-7 for value in start.values())
        moved = {name: value.detach() - LR * value.grad for name, value in start.items()}
        stepped[client] = (len(labels), moved)
    torch.testing.assert_close(
        run.model["prompts.text.global"], averaged(run, stepped, "prompts.text.global"), rtol=0, atol=1e-9
    )
    kept = checkpoint.read(run.folder / "checkpoints" / "1").clients
    for client in cohort:
        (value,) = kept[client].values()
        torch.testing.assert_close(value, stepped[client][1]["prompts.text.local"], rtol=0, atol=1e-9)


# The plan of transport -------------------------------------------------------------------------------------


def test_a_plan_keeps_its_marginals_and_is_the_cheapest():
    """Mass γ arrives in equal parts, no patch gives more than its own; beside a linear program."""
    from scipy.optimize import linprog

    torch.manual_seed(0)
    similarity = torch.rand(5, 2, dtype=torch.float64) * 2 - 1
    mass = 0.7
    plan = partial_plan(similarity, mass, 0.02, 3000)
    assert (plan >= 0).all()
    torch.testing.assert_close(plan.sum(dim=0), torch.full((2,), mass / 2, dtype=torch.float64))
    assert (plan.sum(dim=1) <= 1 / 5 + 1e-6).all()
    rows, columns = np.kron(np.eye(5), np.ones(2)), np.kron(np.ones(5), np.eye(2))
    best = linprog(
        (1 - similarity).flatten().numpy(), A_ub=rows, b_ub=[1 / 5] * 5, A_eq=columns, b_eq=[mass / 2] * 2
    )
    assert ((1 - similarity) * plan).sum().item() == pytest.approx(best.fun, rel=0.03)


def test_all_of_a_picture_is_balanced_transport():
    torch.manual_seed(0)
    plan = partial_plan(torch.rand(3, 4, 6, 2, dtype=torch.float64), 1.0, 0.1, 500)
    torch.testing.assert_close(plan.sum(dim=-1), torch.full((3, 4, 6), 1 / 6, dtype=torch.float64))
    torch.testing.assert_close(plan.sum(dim=-2), torch.full((3, 4, 2), 1 / 2, dtype=torch.float64))
    assert not partial_plan(torch.rand(2, 2, requires_grad=True), 0.8, 0.1, 5).requires_grad


@pytest.mark.parametrize("backbone", [clip, dinov2_bert])
def test_a_patch_is_read_as_the_whole_picture_is(backbone):
    """The first token, read in the way of the patches, is the picture's own feature."""
    dual: DualEncoder = backbone()
    pixels = torch.randn(2, 1, 8, 8)
    hidden = dual.model.vision_model(pixel_values=pixels).last_hidden_state
    torch.testing.assert_close(dual._pooled_tokens(hidden)[:, 0], dual.pooled_image(pixels))
    assert dual.patches(pixels).shape == (2, 4, 12)


# Limits ----------------------------------------------------------------------------------------------------


def test_with_one_context_of_its_own_kept_at_zero_fedpgp_is_promptfl(train):
    """U = 0 and V = 0 have no gradient: what is left is the global context, PromptFL's to the bit."""
    from clients import fedpgp

    promptfl = ["strategy=pfeddc", "strategy.prompts=global", "strategy.modalities=text"]
    plain = train(*promptfl, *COMMON, folder="promptfl", small=False)
    with pytest.MonkeyPatch.context() as patch:
        real = fedpgp.LowRankPrompts.__init__

        def empty(self, *given):
            real(self, *given)
            with torch.no_grad():
                self.u.zero_()
                self.v.zero_()

        patch.setattr(fedpgp.LowRankPrompts, "__init__", empty)
        low = train(*PGP, "strategy.mu=0", folder="pgp", small=False)
    # Both draw the global context first, from one seed.
    assert torch.equal(low.model["prompts.text.global"], plain.model["prompts.text.global"])


@METHODS
def test_the_global_context_alone_travels_to_the_byte(train, words):
    run = train(*words, "model.dtype=float32", "num_rounds=1", small=False)
    row, size = run.rows[1], 3 * 4 * TEXT_TOKENS * TEXT_WIDTH
    assert row["bytes_up_by_role"] == row["bytes_down_by_role"] == {"prompt": size}
    assert row["clients_failed"] == 0 and "fusion" not in run.summary


@METHODS
def test_cohort_equals_sequential(train, words):
    one = train(*words, folder="one", small=False)
    other = train(*words, "runtime.runner=cohort", folder="other", small=False)
    torch.testing.assert_close(other.model, one.model, rtol=0, atol=1e-9)
    states = [checkpoint.read(run.folder / "checkpoints" / "2").clients for run in (one, other)]
    assert states[0].keys() == states[1].keys() == {"0", "1", "2"}
    for client, arrays in states[0].items():
        torch.testing.assert_close(states[1][client], arrays, rtol=0, atol=1e-9)


@METHODS
def test_killed_and_resumed_to_the_bit(train, words):
    whole = train(*words, "num_rounds=3", "participation=0.67", folder="whole", small=False)
    train(*words, "num_rounds=1", "participation=0.67", folder="part", small=False)
    part = train(*words, "num_rounds=3", "participation=0.67", folder="part", resume=True, small=False)
    assert same_bits(whole.model, part.model)
    ends = [checkpoint.read(run.folder / "checkpoints" / "3").clients for run in (whole, part)]
    assert ends[0].keys() == ends[1].keys()
    assert all(same_bits(ends[0][client], ends[1][client]) for client in ends[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*PGP, "strategy.rank=0"], "strategy.rank"),
        ([*OTP, "strategy.mass=1.5"], "strategy.mass"),
        ([*OTP, "strategy.template=photo"], "strategy.template='photo' has no {}"),
        ([*OTP, "strategy.fusion=sum"], "strategy.fusion"),
    ],
)
def test_a_bad_setting_is_one_sentence(words, said, capsys, tmp_path):
    assert command([*words, f"hydra.run.dir={tmp_path}"]) == 2
    assert said in capsys.readouterr().err


# Classes that nobody trained on ----------------------------------------------------------------------------

FAMILY = {
    "pfeddc": ["strategy=pfeddc", *COMMON, "strategy.vision_tokens=2", "strategy.heads=2"],
    "vision alone": ["strategy=pfeddc", *COMMON, "strategy.modalities=vision", "strategy.heads=2"],
    "fedpgp": PGP,
    "pfedmoap": ["strategy=pfedmoap", *COMMON, "strategy.gate_heads=2"],
    "fedotp": OTP,
}
NOVEL = ["dataset.novel=0.5", "dataset.limit=200", "personal=true"]


def test_novel_rows_are_dealt_to_nobody_and_numbered_anew():
    words = [*PGP, *NOVEL]
    config = read(resolved(compose_config(words)))
    corpus, whole = load_corpus(config), load_corpus(read(resolved(compose_config([*PGP, NOVEL[1]]))))
    shares = share_out(corpus, config, 3)
    dealt = np.concatenate([*shares.partition.indices, shares.validation])
    assert set(corpus.train.labels[dealt].tolist()) == set(range(5))
    assert corpus.classes + corpus.novel.classes == corpus.every_class == whole.classes
    assert set(corpus.novel.test.labels.tolist()) == set(range(5)) == set(corpus.test.labels.tolist())
    counts = np.bincount(whole.test.labels.numpy())
    assert np.bincount(corpus.novel.test.labels.numpy()).tolist() == counts[5:].tolist()
    assert sum(map(len, shares.test)) == len(corpus.test) == counts[:5].sum()


@pytest.mark.parametrize(
    "name", ["fedotp", *(pytest.param(name, marks=pytest.mark.slow) for name in [*FAMILY][:-1])]
)
def test_all_prompt_methods_are_judged_on_base_and_novel(train, name):
    run = train(*FAMILY[name], *NOVEL, "num_rounds=1", small=False)
    row = run.rows[1]
    assert row["clients_failed"] == 0 and 0 <= row["novel_accuracy"] <= 1 and math.isfinite(row["novel_loss"])
    personal = json.loads((run.folder / "personal.json").read_text())
    assert all({"personal", "base", "novel"} <= client.keys() for client in personal["clients"])
    assert personal["novel"]["mean"] == pytest.approx(
        np.mean([client["novel"] for client in personal["clients"]])
    )


def test_a_model_reads_other_classes_and_then_its_own_again():
    worker = worker_of(*PGP, *NOVEL)
    before = evaluate_test(worker)
    novel = worker.corpus.novel
    # By hand: the same context before the other names.
    hand = ByHand(worker)
    hand.classes = novel.classes
    start = {name: value[0] for name, value in worker.initial().items()}
    texts = hand.texts(start["prompts.text.global"] + start["prompts.text.u"] @ start["prompts.text.v"])
    images = worker.data.novel_table.inputs["image_features"]
    right = ((images @ texts.T).argmax(dim=1) == novel.test.labels).double().mean()
    assert evaluate_novel(worker)["accuracy"] == pytest.approx(float(right))
    assert evaluate_test(worker) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["strategy=fedavg", "dataset.novel=0.5"], "strategy that reads class names"),
        ([*PGP, "dataset.novel=0.1"], "fewer than two"),
        (["strategy=safl", "dataset.novel=0.5"], "needs pictures"),
    ],
)
def test_where_it_cannot_be_judged_it_says_so(words, said, tmp_path, capsys):
    assert command([*words, "num_rounds=1", f"hydra.run.dir={tmp_path}"]) == 2
    assert said in capsys.readouterr().err


def test_real_sites_keep_their_classes():
    from fedfrozen_app.data.federated import hold_back

    config = read(resolved(compose_config(PGP)))
    with pytest.raises(UserError, match="real sites keep their own rows"):
        hold_back(load_corpus(config), 0.5, deployed=True)
