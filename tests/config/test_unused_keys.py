"""A key that was given and has no effect is refused, whoever gives it."""

from dataclasses import fields

import pytest

import fedfrozen
from fedfrozen_app.__main__ import run as command
from fedfrozen_app.config import compose_run
from fedfrozen_app.config.schema import sections
from fedfrozen_app.config.settings import about
from fedfrozen_app.config.unused_keys import check_used
from fedfrozen_app.core import registry
from fedfrozen_app.core.conf_files import choices
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.run.stored_config import as_it_was

IGNORED = {
    "privacy.epsilon=8": "privacy=none ignores privacy.epsilon: add privacy=dp_sgd",
    "adapter.rank=4": "adapter=none ignores adapter.rank: add adapter=lora",
    "secure_aggregation.min_cohort=5": "ignores secure_aggregation.min_cohort: add secure_aggregation=on",
    "+adapter.ranks.0=4": "adapter=none ignores adapter.ranks.0: add adapter=lora",
    "client.momentum=0.9": "client.optimizer=adamw ignores client.momentum: add client=sgd",
    "dataset.path=.": "dataset.kind=digits ignores dataset.path: add dataset=text",
    "dataset.max_tokens=64": "dataset.kind=digits ignores dataset.max_tokens: add dataset=text",
    "aggregation.trim=0.1": "aggregation=mean ignores aggregation.trim: add aggregation=trimmed_mean",
    "runtime.min_nodes=3": "runtime=inprocess ignores runtime.min_nodes: add runtime=deployed",
    "strategy.warmup_window=3": "ignores strategy.warmup_window: add strategy.warmup_rounds=auto",
    "track.project=mine": "track.wandb=false and track.mlflow=false ignores track.project",
    "run_id=mine": "runtime=inprocess ignores run_id: add runtime=deployed",
    "strategy.mu=1": "The chosen strategy has no key 'strategy.mu': add strategy=fedpgp or fedprox",
    "server_optimizer.lr=1": "no key 'server_optimizer.lr': add server_optimizer=avgm or adam or yogi",
}


@pytest.mark.parametrize("word", IGNORED)
def test_ignored_key_is_refused_with_what_to_add(word: str) -> None:
    with pytest.raises(UserError) as refused:
        _ = compose_run([word]).config
    assert IGNORED[word] in str(refused.value)


def test_command_exits_2_and_leaves_no_folder(tmp_path, capsys) -> None:
    assert command(["privacy.epsilon=8", f"output_dir={tmp_path / 'run'}"]) == 2
    assert "privacy=none ignores privacy.epsilon: add privacy=dp_sgd" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_python_call_refuses_it_too(tmp_path) -> None:
    with pytest.raises(UserError, match=r"adapter=none ignores adapter\.rank"):
        fedfrozen.run(adapter={"rank": 4}, output_dir=tmp_path / "run")


def test_what_makes_it_work_is_accepted() -> None:
    assert compose_run(["privacy=dp_sgd", "privacy.epsilon=8"]).config.privacy.epsilon == 8
    assert compose_run(["adapter=lora", "adapter.rank=4", "strategy=fedavg"]).config.adapter.rank == 4
    assert compose_run(["track.mlflow=true", "track.project=x"]).config.track.project == "x"


@pytest.mark.parametrize("word", ["privacy.delta=null", "partition.balanced=false", "adapter.dropout=0"])
def test_asking_for_nothing_is_not_ignored(word: str) -> None:
    _ = compose_run(["partition=iid", word]).config


def test_mark_for_a_sweep_over_both_states() -> None:
    for name in ("none", "dp_sgd"):
        assert compose_run([f"privacy={name}", "++privacy.epsilon=3"]).config.privacy.name == name
    plain = compose_run(["strategy=fedavg", "++strategy.mu=0.5"])
    assert plain.config.strategy == {"name": "fedavg"}
    assert compose_run(["strategy=fedprox", "++strategy.mu=0.5"]).config.strategy["mu"] == 0.5


def test_mark_hides_no_typo() -> None:
    with pytest.raises(UserError, match=r"strategy\.muu"):
        _ = compose_run(["strategy=fedprox", "++strategy.muu=0.5"]).config


def test_experiments_and_debug_files_set_nothing_in_vain() -> None:
    here = ["dataset.path=."]
    for group in ("experiment", "debug"):
        for name in choices()[group]:
            more = here if "dataset: parquet" in _text(group, name) else []
            _ = compose_run([f"{group}={name}".replace("=nan", "='nan'"), *more]).config


def test_experiment_with_an_ignored_key_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(
        "fedfrozen_app.config.unused_keys.file_values", lambda group, name: {"privacy": {"epsilon": 3}}
    )
    resolved = compose_run([]).resolved
    with pytest.raises(UserError, match=r"experiment=mine: privacy=none ignores privacy\.epsilon"):
        check_used(["experiment=mine"], resolved)
    check_used(["experiment=mine", "privacy=none"], resolved)  # the command line chose another


def test_replacing_a_group_of_an_experiment_is_no_ignored_key() -> None:
    _ = compose_run(["experiment=digits_skewed", "partition=iid"]).config  # its partition.alpha is replaced


def test_record_of_an_older_run_still_opens_and_new_words_are_checked() -> None:
    words = ["privacy.epsilon=8", "num_rounds=3"]
    had = compose_run(words, recorded=True).resolved
    assert as_it_was(words, had).config.num_rounds == 3
    assert as_it_was(words, had, ["num_rounds=4"]).config.num_rounds == 4
    with pytest.raises(UserError, match=r"adapter=none ignores adapter\.rank"):
        as_it_was(words, had, ["adapter.rank=4"])


def test_flower_chooses_the_runtime_of_plain_flwr_run() -> None:
    resolved = compose_run([]).resolved
    check_used(["runtime.node_timeout=3", "partition.alpha=1"], resolved, runtime_known=False)
    with pytest.raises(UserError, match=r"privacy\.epsilon"):
        check_used(["privacy.epsilon=3"], resolved, runtime_known=False)


def test_needs_name_keys_and_values_that_exist() -> None:
    """A need that no configuration could meet would refuse its key for ever."""
    resolved = compose_run([]).resolved
    for section, kind in sections().items():
        whole = getattr(kind, "NEEDS", ())
        for need in (*whole, *(need for one in fields(kind) for need in about(one).needs)):
            for key in need.key.split("|"):
                group, _, name = key.partition(".")
                assert group in resolved, (section, need)
                assert not name or name in resolved[group], (section, need)
            known = {"dataset": "datasets", "model": "models"}.get(need.key)
            names = registry.BUILT_IN[known] if known else choices().get(need.key)
            if names is not None:
                assert set(need.values) <= set(names), (section, need)


def _text(group: str, name: str) -> str:
    from fedfrozen_app.core.conf_files import conf_dir

    return (conf_dir() / group / f"{name}.yaml").read_text()
