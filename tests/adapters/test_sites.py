"""Adapters over real executors and policies: what may leave, and who is sent the base."""

import json
import shutil

import pytest
import torch

from fedfrozen_app.errors import RunFailed, UserError
from fedfrozen_app.models import lora
from fedfrozen_app.models.adapted import base_digest
from tests.sites.inprocess import Sites, copy_of

LORA = ["strategy=fedavg", "adapter=lora", "adapter.rank=2", "num_rounds=2", "track.tensorboard=false"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sites")
    sites = Sites(folder)
    sites.prepare()
    for name in sites.names:
        sites.change(name, "policy.yaml", strategies=["fedavg"], upload_roles=["adapter", "head"])
        sites.change(name, "policy.yaml", privacy_required=False)
    return folder


@pytest.fixture
def sites(prepared, tmp_path):
    return Sites(copy_of(prepared, tmp_path / "sites"))


def logged(sites, name):
    lines = (sites.folder / "kits" / name / "var" / "audit.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("rule", ["average", "fedex", "stack"])
def test_sites_that_let_adapters_leave_take_part_and_the_base_never_travels(sites, rule):
    run = sites.train(*LORA, f"adapter.rule={rule}")
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 3]
    assert set(run.rows[1]["bytes_down_by_role"]) == {"query", "value", "head"}
    whole = 3 * sum(v.numel() * 4 for n, v in run.model.items() if "/" not in n)
    assert sum(run.rows[1]["bytes_down_by_role"].values()) == whole


def test_the_weights_themselves_may_not_leave_such_a_site(sites):
    with pytest.raises((RunFailed, UserError)):
        sites.train("strategy=fedavg", "num_rounds=1", "track.tensorboard=false")
    assert "may not leave it" in (sites.folder / "kits" / "north" / "var" / "audit.jsonl").read_text()


def test_a_policy_without_the_word_lets_no_adapter_leave(sites):
    sites.change("north", "policy.yaml", upload_roles=["query", "key", "value", "head"])
    run = sites.train(*LORA)
    assert [row["clients_ok"] for row in run.rows[1:]] == [2, 2]
    assert "adapter parameters, which may not leave it" in json.dumps(logged(sites, "north"))


def test_a_site_with_another_base_is_sent_the_federations_once(sites, monkeypatch):
    """The server's model is read from a folder; one site has other weights in its own."""
    from fedfrozen_app.local.resident import Resident

    built = Resident._build

    def build(self):
        model = built(self)
        return model

    import fedfrozen_app.models.adapted as adapted

    original = adapted.Adapted.build

    def other(self, config, corpus):
        """What a site would have whose model folder is of another version."""
        model = original(self, config, corpus)
        if config.dataset.path and "west" in str(config.dataset.path) and not getattr(model, "older", False):
            model.older = True
            with torch.no_grad():
                for name in self.fixed_names(model):
                    model.get_parameter(name).add_(1)
            self._digest = base_digest(self._fixed(model))
        return model

    monkeypatch.setattr(adapted.Adapted, "build", other)
    plain = sites.train(*LORA, "num_rounds=3", folder="with")
    sent = [row["bytes_down_by_role"] for row in plain.rows[1:]]
    assert [row["clients_ok"] for row in plain.rows[1:]] == [3, 3, 3]
    assert "embedding" in sent[0] and "norm" in sent[0]
    assert set(sent[1]) == set(sent[2]) == {"query", "value", "head"}
    size = {"mlp": 2 * (2 * 16 * 32 + 32 + 16) * 4, "norm": (2 * 2 + 1) * 2 * 16 * 4}
    assert {role: sent[0][role] for role in size} == size  # to one site, once
    monkeypatch.setattr(adapted.Adapted, "build", original)
    shutil.rmtree(sites.folder / "kits" / "west" / "var", ignore_errors=True)
    alike = sites.train(*LORA, "num_rounds=3", "run_id=other", folder="without")
    for name, value in alike.model.items():
        assert torch.equal(value, plain.model[name]), name
    assert any(lora.is_adapter(name) for name in alike.model)
