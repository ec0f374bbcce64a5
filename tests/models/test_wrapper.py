"""The seam that adapters will use: a wrapper with a frozen base, of which the core knows nothing."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers import ViTForImageClassification

from fedfrozen_app.commands.forecast import forecast
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core.digests import digest
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.launch import load_run
from fedfrozen_app.local.model_evaluation import evaluate_test
from fedfrozen_app.local.worker import Worker, make_data_spec
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.models.wrapper import Wrapper, wrapper_of
from strategies.fedavg import FedAvg
from tests.conftest import SMALL, same_bits


class Tuned(nn.Module):
    """A frozen ViT whose head is moved by a product of two narrow matrices: W + B·A, with B = 0 at first."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        classes, width = base.classifier.weight.shape
        like = base.classifier.weight
        first = torch.linspace(-1, 1, width, dtype=like.dtype, device=like.device)
        self.a = nn.Parameter(first.repeat(rank, 1))
        self.b = nn.Parameter(torch.zeros((classes, rank), dtype=like.dtype, device=like.device))

    def roles(self):
        inner = {f"base.{name}": role for name, role in roles_of(self.base).items()}
        return {"a": Role("head"), "b": Role("head"), **inner}

    def forward(self, pixel_values):
        found = self.base.vit(pixel_values).last_hidden_state[:, 0]
        scores = self.base.classifier(found) + found @ self.a.T @ self.b.T
        return type("Scores", (), {"logits": scores})


@dataclass
class HeadAdapter(Wrapper):
    rank: int = 1

    def build(self, config, corpus):
        return Tuned(super().build(config, corpus), self.rank).eval()

    def outline(self, config, shape):
        return Tuned(super().outline(config, shape), self.rank)

    def data_spec(self, config, corpus):
        return {"base": digest(super().build(config, corpus).classifier.weight)}

    def check_data_spec(self, own, federation):
        if own["base"] != federation["base"]:
            raise UserError("The base model here is not the federation's.")

    def fixed_names(self, model):
        return frozenset(name for name, _ in model.named_parameters() if name.startswith("base."))

    @torch.no_grad()
    def metrics(self, model):
        return {"adapter_norm": float((model.b @ model.a).norm())}

    def export(self, model, folder, classes, *, merged=True):
        with torch.no_grad():
            model.base.classifier.weight += model.b @ model.a
        super().export(model.base, folder, classes)


@pytest.fixture
def adapted(monkeypatch):
    monkeypatch.setattr(FedAvg, "wrapper", classmethod(lambda cls, settings: HeadAdapter()))
    return ["strategy=fedavg", "client=sgd", "client.lr=0.01", "partition=iid"]


def config_of(*words):
    return read(resolved(compose_config([*SMALL, *words])))


def worker_of(config, **more):
    corpus = load_corpus(config)
    return Worker(config, corpus, shares=share_out(corpus, config, 3), **more)


@pytest.mark.slow
def test_adapters_alone_train_and_travel(adapted, train):
    run = train(*adapted, "num_rounds=2")
    assert set(run.model) == {"a", "b"} and run.model["b"].any()
    sent = 3 * 4 * (16 + 10)
    assert [row["bytes_up_by_role"] for row in run.rows[1:]] == [{"head": sent}] * 2
    assert run.rows[1]["bytes_down_by_role"] == {"head": sent}
    assert all(row["adapter_norm"] > 0 for row in run.rows[1:])
    # Built once more, the base is the one that the run trained them on.
    assert (
        evaluate_test(load_run(run.folder, []))["loss"]
        == run.rows[-1]["test_loss"]
        != run.rows[0]["test_loss"]
    )
    planned = forecast(config_of(*adapted, "num_rounds=2"))
    assert [dict(part) for part in planned.up_by_round] == [{"head": sent}] * 2
    assert set(planned.stages[0].plan.trained) == {"a", "b"}


@pytest.mark.slow
def test_both_runners_train_them_alike(adapted, train):
    words = [*adapted, "model.dtype=float64", "num_rounds=2"]
    one = train(*words, folder="one").model
    all_at_once = train(*words, "runtime.runner=cohort", folder="all").model
    for name, value in one.items():
        torch.testing.assert_close(all_at_once[name], value, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_the_export_is_the_merged_model(adapted, train, tmp_path):
    run = train(*adapted, "num_rounds=1")
    worker = load_run(run.folder, [])
    pixels = torch.randn(4, 1, 8, 8)
    with torch.no_grad():
        expected = worker.model(pixels).logits
        worker.export(tmp_path / "exported")
        merged = ViTForImageClassification.from_pretrained(tmp_path / "exported").eval()(pixels).logits
    torch.testing.assert_close(merged, expected)


@pytest.mark.slow
def test_a_node_with_another_base_is_refused(adapted):
    config = config_of(*adapted)
    corpus = load_corpus(config)
    data_spec = make_data_spec(corpus, config)
    assert data_spec["base"] and data_spec["classes"] == list(corpus.classes)
    assert worker_of(config, data_spec=data_spec).data_spec == data_spec
    with pytest.raises(UserError, match="not the federation's"):
        worker_of(config_of(*adapted, "seed=1"), data_spec=data_spec)


@pytest.mark.slow
def test_a_model_goes_on_to_a_run_with_an_equal_wrapper(adapted, monkeypatch):
    worker = worker_of(config_of(*adapted))
    assert worker.can_switch_to(config_of(*adapted))
    monkeypatch.setattr(FedAvg, "wrapper", classmethod(lambda cls, settings: HeadAdapter(rank=2)))
    assert not worker.can_switch_to(config_of(*adapted))
    # fedfrozen, of a plain model
    assert not worker.can_switch_to(config_of("client=sgd", "client.lr=0.01"))


def test_a_plain_model_answers_nothing():
    config = config_of()
    wrapper = wrapper_of(config)
    assert wrapper == Wrapper() and wrapper.reusable and not wrapper.has_global
    worker = worker_of(config)
    assert worker.exchanged.keys() == worker.parameters.keys()
    assert wrapper.features(worker.model) is None and worker.figures() == {}
    before = {name: value.clone() for name, value in worker.exchanged.items()}
    with worker.only_global():
        assert same_bits(before, worker.exchanged)
    assert set(worker.data_spec) == {"classes", "mean", "std"}


def test_an_old_name_of_an_overridden_method_still_works():
    with pytest.warns(DeprecationWarning, match="Old: `figures` is now `metrics`"):

        class Old(Wrapper):
            def figures(self, model):
                return {"seen": 1.0}

    assert Old().metrics(None) == {"seen": 1.0}
