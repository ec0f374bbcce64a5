"""An operator's mistakes are found before a run is handed in, and sites are asked."""

import shutil
import socket
from pathlib import Path

import pytest
import yaml

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.runtimes.flower.superlink_connection import Connection
from fedfrozen_app.sites.federation_plan import read_federation
from fedfrozen_app.sites.kit_writer import write_kits
from tests.sites.federation import write_data


@pytest.fixture
def operator(tmp_path, monkeypatch):
    """An operator's kit whose server only listens; to hand in a run, or to ask for sites, fails the test."""

    def asked(*words, **named):
        raise AssertionError("the server was asked")

    monkeypatch.setattr(Connection, "submit", asked)
    monkeypatch.setattr(Connection, "sites", asked)
    with socket.create_server(("127.0.0.1", 0)) as server:
        plan = {"server": {"address": "127.0.0.1", "port": server.getsockname()[1]}, "sites": ["north"]}
        (tmp_path / "federation.yaml").write_text(yaml.safe_dump(plan))
        write_kits(read_federation(tmp_path / "federation.yaml"), tmp_path / "kits")
        yield tmp_path / "kits" / "operator"


def deployed(operator: Path, data: Path) -> int:
    out = operator.parents[1] / "run"
    where = [f"dataset.path={data}", f"output_dir={out}", f"hydra.run.dir={out}"]
    return command(["runtime=deployed", f"runtime.server_kit={operator}", "dataset=images", *where])


def test_a_folder_with_test_alone_is_refused_before_the_run_is_handed_in(operator, tmp_path, capsys):
    write_data(tmp_path, tmp_path / "kits", ["north"], rows=20)
    shutil.rmtree(tmp_path / "server" / "train")
    assert deployed(operator, tmp_path / "server") == 2
    said = capsys.readouterr().err
    assert "has a folder 'test' but no 'train'" in said
    assert f"dataset.path={tmp_path}/server/test to use these alone" in said
    # As it says: all of these are test rows then. The server is asked now.
    with pytest.raises(AssertionError, match="the server was asked"):
        deployed(operator, tmp_path / "server" / "test")
