"""One kit on two machines, and an authority that is replaced, over real processes: `pytest -m slow`."""

import shutil
from pathlib import Path

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.kit import Kit
from tests.conftest import Run
from tests.sites.federation import SITES, Deployment, federation, wait_for_port, wait_for_socket
from tests.sites.test_doors import PULL, post, wait_for
from tests.sites.twin import join, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
TWO = SITES[:2]
SHORT = (
    *("strategy=fedavg", "model=linear", "num_rounds=1", "runtime.min_nodes=2"),
    *("runtime.node_timeout=600", "runtime.round_timeout=600"),
)


def trained(deployment: Deployment, folder: Path, *more: str) -> Run:
    line = [word for word in words(deployment, folder, *SHORT, *more) if "model.config" not in word]
    assert command(line) == 0
    return Run(folder)


def events(kit: Path) -> list[str]:
    return [entry["event"] for entry in read_audit(Kit.read(kit).audit)]


def test_a_kit_on_two_machines_is_served_on_one_and_its_two_logs_show(tmp_path, capsys):
    """A copy with earlier records, as a backup brings back: started beside the site, and after it."""
    private = ("privacy=dp_sgd", "privacy.epsilon=3", "privacy.delta=1e-5")
    with federation(tmp_path / "fed", TWO) as deployment:
        join(deployment, TWO)
        north, copy = deployment.kits / "north", deployment.kits / "copy"
        shutil.copytree(north, copy, ignore=shutil.ignore_patterns("run", "flwr"))
        deployment.start("copy", "supernode")
        deployment.start("copy", "executor")
        one = trained(deployment, tmp_path / "one", *private)
        assert one.rows[-1]["clients"] == ["north", "south"]
        assert events(north) == ["hello", "sent"] and events(copy) == []
        assert "SuperNode ID" not in deployment.log("copy-supernode")  # it is turned away, and tries again

        deployment.kill("north-supernode")
        deployment.kill("north-executor")
        deployment.wait_for_line("copy-supernode", "SuperNode ID")
        two = trained(deployment, tmp_path / "two", *private)
        assert two.rows[-1]["clients"] == ["north", "south"]
        # The copy knows nothing of what north spent, which nobody but the server can tell.
        assert events(copy) == ["hello", "sent"]
        for kit, run, code in ((north, "one", 0), (copy, "two", 0), (copy, "one", 2), (north, "two", 2)):
            anchors = ["--anchors", str(tmp_path / run / "anchors.jsonl")]
            assert command(["site", "audit", str(kit), *anchors]) == code, (kit.name, run)


def restart_server(deployment: Deployment) -> None:
    for part in ("superlink", "proxy", "superexec"):
        deployment.kill(f"server-{part}")
    for part in ("superlink", "proxy", "superexec"):
        deployment.start("server", part)
        if part == "superlink":
            wait_for_socket(deployment.kits / "server" / "run" / "superlink.sock")
    wait_for_port(deployment.port)
    assert deployment.server("admit").returncode == 0


def test_an_authority_is_replaced_while_sites_train(tmp_path, capsys):
    """First the server and north are renewed, and south goes on as before; then the others."""
    with federation(tmp_path / "fed", TWO) as deployment:
        kits, plan = deployment.kits, deployment.folder / "federation.yaml"

        def renew(*names: str) -> None:
            for name in names:
                assert command(["provision", str(plan), "-o", str(kits), "--renew", name]) == 0

        def restart(site: str) -> None:
            for part in ("supernode", "executor"):
                deployment.kill(f"{site}-{part}")
            deployment.restart_site(site)

        join(deployment, TWO)
        before = tmp_path / "before"
        shutil.copytree(kits / "south", before / "south", ignore=shutil.ignore_patterns("var", "run", "data"))
        assert command(["provision", "rotate", "-o", str(kits)]) == 0
        renew("server", "north")
        restart_server(deployment)
        restart("north")
        assert trained(deployment, tmp_path / "overlap").rows[-1]["clients"] == list(TWO)
        capsys.readouterr()
        assert command(["provision", "rotate", "-o", str(kits), "--finish"]) == 2
        assert "operator, south would be shut out" in capsys.readouterr().err
        renew("south", "operator")
        assert command(["provision", "rotate", "-o", str(kits), "--finish"]) == 0
        renew("server")
        restart_server(deployment)
        restart("south")
        assert trained(deployment, tmp_path / "after").rows[-1]["clients"] == list(TWO)
        # What the old authority signed opens nothing any more.
        old = before / "south" / "node.crt"
        wait_for(lambda: post(deployment, PULL, "south", certificate=old) == 400)
