"""A run composes its configuration once, and carries it in one object."""

import json
from dataclasses import replace

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.config import compose_run
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import status
from tests.conftest import SMALL


@pytest.fixture
def compositions(monkeypatch):
    """The words of everything that Hydra composes."""
    found = []
    plain = ConfigLoaderImpl.load_configuration

    def load(self, config_name, overrides, *args, **keys):
        found.append(overrides)
        return plain(self, config_name, overrides, *args, **keys)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", load)
    return found


def test_a_run_its_resumption_and_its_evaluation_compose_once_each(compositions, tmp_path):
    folder = tmp_path / "run"
    assert command([*SMALL, "num_rounds=1", "strategy=fedavg", f"output_dir={folder}"]) == 0
    assert len(compositions) == 1
    assert (folder / ".hydra" / "config.yaml").is_file() and (folder / ".hydra" / "hydra.yaml").is_file()
    (folder / "summary.json").rename(tmp_path / "summary.json")
    status.write(folder, replace(status.read(folder), state="failed"))
    assert command(["resume", str(folder)]) == 0
    assert len(compositions) == 2
    assert command(["evaluate", str(folder)]) == 0
    assert len(compositions) == 3
    before, after = (json.loads((place / "summary.json").read_text()) for place in (tmp_path, folder))
    assert json.dumps(before["config"]) == json.dumps(after["config"])


def test_its_forms_agree_and_paths_become_absolute_in_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("text,label\n")
    run = compose_run(["dataset=text", "dataset.path=rows.csv", "output_dir=here"])
    whole = run.with_absolute_paths()
    assert run.config.dataset.path == run.resolved["dataset"]["path"] == "rows.csv"
    assert whole.config.dataset.path == whole.resolved["dataset"]["path"] == f"{tmp_path}/rows.csv"
    assert whole.overrides == [*run.overrides, f"dataset.path='{tmp_path}/rows.csv'"]
    assert whole.resolved["output_dir"] == "here"
    assert compose_run(whole.overrides).resolved == whole.resolved
    assert whole.with_absolute_paths() is whole


def test_a_run_that_continues_records_where_it_was_forked_from_and_does_not_read_it():
    run = compose_run(["from=gone/checkpoints/1"])
    with pytest.raises(UserError, match="does not exist"):
        _ = run.config
    assert run.continuing().config.start_from is None
    assert run.continuing().resolved["from"] == "gone/checkpoints/1"
