"""docs/deployment.md is carried out as it is written: all its parties in one folder, on this machine."""

import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fedfrozen_app.commands.try_sites.examples import CLASSES, write_examples
from fedfrozen_app.commands.try_sites.shown import Shell
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.runtimes.flower.processes import flower_environment, free_port
from fedfrozen_app.sites.approval import Approvals
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.kit import Kit

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
STEPS = PAGE[PAGE.index("## Step by step") : PAGE.index("## What can go wrong")]
PATIENCE = 900.0  # seconds: a dozen processes on a busy machine
SITES = ("north", "south")


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", STEPS, re.MULTILINE | re.DOTALL)


def test_the_page_begins_with_the_trial():
    line = re.search(r"^fedfrozen try-sites.*$", PAGE, re.MULTILINE)
    assert line and parse("try-sites", line[0].split()[2:]).yes
    assert PAGE.index("nginx") < PAGE.index("## Step by step")
    assert len(PAGE.split()) <= 1500


def answered(line: str, folder: Path) -> str:
    """Run a command in a terminal in which a person says yes to every question; its output."""
    master, slave = pty.openpty()
    environment = flower_environment(folder / "flwr") | {
        "FEDFROZEN_AUTHORITY_PASSPHRASE": "a long passphrase"
    }
    process = subprocess.Popen(
        line,
        shell=True,
        cwd=folder,
        env=environment,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    said = ""
    while True:
        try:
            piece = os.read(master, 4096).decode(errors="replace")
        except OSError:  # the process has closed its side
            break
        if not piece:
            break
        said += piece
        if piece.rstrip().endswith("[y/N]"):
            os.write(master, b"y\n")
    os.close(master)
    assert process.wait() == 0, f"{line}\n{said}"
    return said


def wait_for(condition, shown: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, shown.read_text(errors="replace")[-3000:]
        time.sleep(0.2)


def fill_in(folder: Path) -> None:
    """What a reader writes into the files: this machine's address and ports, views, the policies' line."""
    plan, views, policy = (yaml.safe_load(block) for block in fenced("yaml"))
    if not (folder / "federation.yaml").exists():
        plan["server"] = {"address": "127.0.0.1", "port": free_port(), "internal_port": free_port()}
        (folder / "federation.yaml").write_text(yaml.safe_dump(plan))
        return
    for site in SITES:
        own = {"main": views["views"]["main"] | {"path": str(folder / "data" / site), "classes": CLASSES}}
        for name, values in (("site.yaml", {"views": own}), ("policy.yaml", policy)):
            path = folder / site / name
            path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
@pytest.mark.skipif(sys.platform != "linux", reason="sites run on Linux")
def test_every_step_of_the_page(tmp_path):
    write_examples(tmp_path / "data", SITES)
    fill_in(tmp_path)
    lines = [line for block in fenced("bash") for line in block.splitlines()]
    assert len(lines) >= 20
    run, proposed = None, ""
    with Shell(tmp_path) as shell:
        for line in lines:
            if line.startswith("sh "):
                log = tmp_path / f"{line.split()[1].partition('/')[0]}.log"
                shell.start(line, log, shown=False)
                if "server" in line:
                    wait_for((tmp_path / "server" / "run" / "superlink.sock").exists, log)
                else:
                    wait_for(lambda log=log: "SuperNode ID" in log.read_text(errors="replace"), log)
                continue
            if line.startswith("fedfrozen site check"):
                fill_in(tmp_path)
            if line.startswith("fedfrozen runtime=deployed"):
                run = shell.start(line.replace("DIR", str(tmp_path / "data/test")), tmp_path / "run.log")
                kits = [Kit.read(tmp_path / site) for site in SITES]
                wait_for(
                    lambda kits=kits, run=run: (
                        run.poll() is not None or all(Approvals(kit.approvals).proposals() for kit in kits)
                    ),
                    tmp_path / "run.log",
                )
                proposed = Approvals(kits[0].approvals).proposals()[0].hash
                continue
            if line.startswith("fedfrozen site audit"):
                wait_for(lambda run=run: run.poll() is not None, tmp_path / "run.log")
            answered(line.replace("HASH", proposed[:4]), tmp_path)
        assert run.wait() == 0, (tmp_path / "run.log").read_text()
    for site in SITES:
        log = read_audit(Kit.read(tmp_path / site).audit)
        assert [entry["event"] for entry in log] == ["pending", "hello", "sent", "sent", "sent"]
    assert (tmp_path / "run" / "report.html").exists()
