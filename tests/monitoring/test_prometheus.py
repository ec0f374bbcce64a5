"""Alerts of a real Prometheus over real endpoints, for faults that need no run: `pytest -m slow`.

All twelve, over three sites that train: `python -m tests.chaos.twelve_alerts`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import yaml
from cryptography import x509

from fedfrozen_app.core.certificates import PEM
from fedfrozen_app.sites.authority import Authority, Passphrase
from fedfrozen_app.sites.federation_plan import read_federation
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.kit_writer import write_kits
from tests.chaos.alerting import watched
from tests.monitoring.kits import sent, write_budget, write_events
from tests.sites.federation import our_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian) is not installed"),
]
SITE = "north"


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """Kits of a server and a site with their endpoints, a Prometheus, and a process for the executor."""
    folder = tmp_path_factory.mktemp("fed")
    plan = {"server": {"address": "127.0.0.1", "port": 8443}, "sites": [SITE]}
    (folder / "federation.yaml").write_text(yaml.safe_dump(plan))
    write_kits(read_federation(folder / "federation.yaml"), folder / "kits")
    kit = Kit.read(folder / "kits" / SITE)
    write_budget(kit, 0.1)
    write_events(kit, [sent(bundle=yaml.safe_load(kit.policy.read_text())["bundles"][0])])
    kit.meeting.mkdir(mode=0o700)
    executor = subprocess.Popen([sys.executable, "-c", EXECUTOR, str(kit.meeting), "exec"])
    deployment = SimpleNamespace(folder=folder, kits=folder / "kits")
    try:
        with our_command(folder / "bin"), watched(deployment, (SITE,)) as prometheus:
            yield SimpleNamespace(kit=kit, prometheus=prometheus, executor=executor, folder=folder)
    finally:
        executor.kill()


EXECUTOR = """\
import pathlib, sys, time
from fedfrozen_app.sites.sign import Note
note = Note(pathlib.Path(sys.argv[1]), "executor")
while True:
    note.write("waiting", 300)
    time.sleep(0.25)
"""


def policy(scene, **values):
    found = yaml.safe_load(scene.kit.policy.read_text())
    scene.kit.policy.write_text(yaml.safe_dump(found | values))
    return {key: found[key] for key in values}


@contextmanager
def certificate(scene):
    path = scene.kit.folder / "node.crt"
    before = path.read_bytes()
    public = x509.load_pem_x509_certificate(before).public_key()
    authority = Authority.read(scene.folder / "kits" / "authority", Passphrase())
    path.write_bytes(authority.issue(public, SITE, "site", 5).public_bytes(PEM))
    yield
    path.write_bytes(before)


@contextmanager
def approval(scene):
    scene.kit.approvals.mkdir(exist_ok=True)
    asked = scene.kit.approvals / f"{'a' * 64}.json"
    asked.write_text("{}")
    os.utime(asked, (time.time() - 9, time.time() - 9))
    yield
    asked.with_suffix(".decision").write_text(json.dumps({"approved": True, "by": "x", "time": ""}))


@contextmanager
def version(scene):
    before = policy(scene, bundles=["0" * 64])
    yield
    policy(scene, **before)


@contextmanager
def budget(scene):
    before = policy(scene, max_epsilon=0.1)
    yield
    policy(scene, **before)


@contextmanager
def hung(scene):
    scene.executor.send_signal(signal.SIGSTOP)
    yield
    scene.executor.send_signal(signal.SIGCONT)


@contextmanager
def record(scene):
    path = scene.kit.var / "state" / "budget.json"
    before = path.read_text()
    path.write_text(before.replace("0.1", "0.2"))
    yield
    path.write_text(before)


@contextmanager
def forbidden(scene):
    before = policy(scene, monitoring="none")
    yield
    policy(scene, **before)


FAULTS = {
    "FedfrozenCertificateEnds": certificate,
    "FedfrozenApprovalMissing": approval,
    "FedfrozenVersionRefused": version,
    "FedfrozenBudgetExhausted": budget,
    "FedfrozenExecutorHung": hung,
    "FedfrozenRecordDamaged": record,
    "FedfrozenTargetDown": forbidden,
}


@pytest.mark.parametrize("alert", FAULTS)
def test_each_fires_within_a_minute_and_clears(scene, alert):
    assert not any(one.startswith(alert) for one in scene.prometheus.firing())
    with FAULTS[alert](scene):
        fired = scene.prometheus.wait_for(alert, firing=True, patience=60)
        print(alert, "fires after", fired)
    assert fired is not None
    assert scene.prometheus.wait_for(alert, firing=False, patience=60) is not None


def test_a_server_and_a_supernode_that_do_not_run(scene):
    for alert in ("FedfrozenServerDown{server}", f"FedfrozenSitePartDown{{{SITE}}}"):
        assert scene.prometheus.wait_for(alert, firing=True, patience=60) is not None
