"""A language model over sites: each with prompts of its own, by its own view, and no classes to agree on."""

import json
from dataclasses import dataclass

import pytest

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.proposal import propose
from fedfrozen_app.sites.audit_log import read_audit
from tests.sites.inprocess import BUNDLE, OPEN, TINY, Sites

VIEW = {"kind": "instructions", "path": "prompts.jsonl", "classes": [], "max_tokens": 24}
WORDS = ["dataset=instructions", "dataset.max_tokens=24", "model.config.num_key_value_heads=1"]


@dataclass
class LanguageSites(Sites):
    def words(self, *overrides):
        data = [f"dataset.path={self.folder}/server.jsonl", "runtime.node_timeout=0.3", "runtime=deployed"]
        return [*TINY, *WORDS, *data, "runtime.min_nodes=3", "run_id=test", *overrides]


def write(path, count, first):
    lines = [{"question": f"{n}?", "reply": "so " * (n % 4) + str(n)} for n in range(first, first + count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def sites(tmp_path, monkeypatch):
    monkeypatch.setattr("fedfrozen_app.report.output.write_curves", lambda *args, **kwargs: None)
    found = LanguageSites(tmp_path)
    found.prepare()
    for number, name in enumerate(found.names):
        write(tmp_path / "kits" / name / "prompts.jsonl", 30 + 10 * number, 100 * number)
        found.change(name, "site.yaml", views={"main": {**VIEW, "answer_column": "reply"}})
        found.change(name, "policy.yaml", **OPEN, bundles=[BUNDLE], strategies=["fedfrozen", "local"])
    write(tmp_path / "server.jsonl", 20, 1000)
    return found


def test_a_language_model_trains_over_sites_and_is_judged_by_tokens(sites):
    given = ["dataset.answer_column=reply", "strategy=fedfrozen", "strategy.warmup_rounds=1", "num_rounds=2"]
    run = sites.train(*given)
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 3]
    assert run.rows[-1]["test_perplexity"] < run.rows[0]["test_perplexity"]
    assert run.summary["final_test_perplexity"] == run.rows[-1]["test_perplexity"]
    assert json.loads((run.folder / "samples.json").read_text())[0]["prompt"] == "1000?"
    events = [entry["event"] for entry in read_audit(sites.kit("north").audit)]
    assert events == ["hello", "sent", "sent"]


def test_a_view_with_classes_does_not_fit_a_language_model(sites):
    for name in sites.names:
        sites.change(
            name, "site.yaml", views={"main": {**VIEW, "answer_column": "reply", "classes": ["a", "b"]}}
        )
    with pytest.raises(Exception, match="site"):
        sites.train("dataset.answer_column=reply", "strategy=fedfrozen", "num_rounds=1")
    (refused,) = {entry["reason"] for entry in read_audit(sites.kit("north").audit)}
    assert "the run's classes are not those of the view main" in refused


@pytest.mark.parametrize(
    "key", ["model.gradient_checkpointing=true", "model.roles=FILE", "dataset.augment=crop_flip"]
)
def test_what_is_of_one_machine_is_not_proposed(sites, key):
    (sites.folder / "opt.yaml").write_text("roles: {a: mlp}")
    key = key.replace("FILE", str(sites.folder / "opt.yaml"))
    config = read(resolved(compose_config(sites.words(key))))
    with pytest.raises(UserError, match=r"of this machine|this machine's|no part of a proposal"):
        propose(config, {"classes": (), "mean": (), "std": ()}, "run", ())
