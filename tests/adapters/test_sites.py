"""Adapters over real executors and policies: what may leave, and who is sent the base."""

import pytest
import torch

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.data.table import InputShape
from fedfrozen_app.exchange.proposal import propose, read_proposal
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.models.build import build_model
from fedfrozen_app.models.export import export_model
from tests.conftest import slowly

LORA = ["strategy=fedavg", "adapter=lora", "adapter.rank=2", "num_rounds=2", "track.tensorboard=false"]


@pytest.fixture
def sites(sites):
    for name in sites.names:
        policy = {"strategies": ["fedavg"], "upload_roles": ["adapter", "head"], "privacy_required": False}
        sites.change(name, "policy.yaml", **policy)
    return sites


@pytest.mark.parametrize("rule", ["stack", *slowly("average", "fedex")])
def test_sites_that_let_adapters_leave_take_part_and_the_base_never_travels(sites, rule):
    run = sites.train(*LORA, f"adapter.rule={rule}")
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 3]
    assert set(run.rows[1]["bytes_down_by_role"]) == {"query", "value", "head"}
    whole = 3 * sum(v.numel() * 4 for n, v in run.model.items() if "/" not in n)
    assert sum(run.rows[1]["bytes_down_by_role"].values()) == whole


def test_what_is_proposed_of_adapters_is_read_again_and_nothing_else_is():
    config = read(resolved(compose_config([*LORA, "+adapter.ranks.north=1", "adapter.layers=0-1"])))
    data_spec = {"classes": ["a", "b"], "mean": [], "std": [], "base": "0" * 64}
    proposal = propose(config, data_spec, "run", ["adapter", "head"])
    assert read_proposal(proposal.text).adapter == config.adapter and "path" not in proposal.plain["adapter"]
    for change in ({"ranks": {"../x": 1}}, {"ranks": {"north": "1"}}, {"path": "/etc"}, {"rule": "a/b"}):
        found = proposal.plain | {"adapter": proposal.plain["adapter"] | change}
        with pytest.raises(ValueError, match="adapter"):
            read_proposal(canonical(found))


def test_the_weights_themselves_may_not_leave_such_a_site(sites):
    with pytest.raises((RunFailed, UserError)):
        sites.train("strategy=fedavg", "num_rounds=1", "track.tensorboard=false")
    assert "may not leave it" in (sites.folder / "kits" / "north" / "var" / "audit.jsonl").read_text()


def test_a_policy_without_the_word_lets_no_adapter_leave(sites):
    sites.change("north", "policy.yaml", upload_roles=["query", "key", "value", "head"])
    run = sites.train(*LORA)
    assert [row["clients_ok"] for row in run.rows[1:]] == [2, 2]
    assert "adapter parameters, which may not leave it" in sites.kit("north").audit.read_text()


SHAPE = InputShape("image", tuple("0123456789"), channels=1, image_size=8)
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def model_folder(folder, seed):
    """A folder of transformers', as a site or the server has one."""
    model = build_model(
        source="config",
        path=None,
        model_type="vit",
        config={**SIZES, "patch_size": 4},
        shape=SHAPE,
        dtype="float32",
        seed=seed,
    )
    export_model(model, folder, SHAPE.classes)
    return folder


@pytest.mark.slow
def test_a_site_with_another_base_is_sent_the_federations_once_and_never_again(sites, tmp_path):
    """Two sites have the server's model folder; the third has one of the same shape with other weights."""
    own, other = model_folder(tmp_path / "model", 0), model_folder(tmp_path / "older", 1)
    sites.settings = [word for word in sites.settings if not word.startswith("model.")]
    words = [*LORA, "model=checkpoint", f"model.path={own}", "num_rounds=3"]
    for name, folder in (("north", own), ("south", own), ("west", own)):
        sites.change(name, "site.yaml", model_path=str(folder))
    alike = sites.train(*words, "run_id=alike", folder="alike")
    sites.change("west", "site.yaml", model_path=str(other))
    run = sites.train(*words, "run_id=unlike", folder="unlike")
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 3, 3]
    usual = alike.rows[1]["bytes_down_by_role"]
    width, mlp, layers = 16, 32, 2
    projection = layers * (width * width + width) * 4
    patches = (4 * 4 * width + width + (1 + 4) * width + width) * 4  # projection, positions, class token
    # The frozen weights to one site, and nothing else: first adapters and head are on all disks by then.
    assert run.rows[1]["bytes_down_by_role"] == {
        **dict.fromkeys(("query", "key", "value", "output"), projection),
        "mlp": layers * (2 * width * mlp + mlp + width) * 4,
        "norm": (2 * layers + 1) * 2 * width * 4,
        "embedding": patches,
    }
    assert [row["bytes_down_by_role"] for row in run.rows[2:]] == [usual, usual]
    for name, value in alike.model.items():
        assert torch.equal(value, run.model[name]), name
    # Another run of the same base: the site's disk has it.
    again = sites.train(*words, "run_id=again", folder="again")
    assert "embedding" not in again.rows[1]["bytes_down_by_role"]
    for name, value in alike.model.items():
        assert torch.equal(value, again.model[name]), name
