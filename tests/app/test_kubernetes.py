"""The manifests of docs/kubernetes: valid by Kubernetes' schemas; their scripts and probes work."""

import os
import re
import socketserver
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import yaml

from fedfrozen_app.sites.sign import Note

FOLDER = Path(__file__).parents[2] / "docs" / "kubernetes"
FILES = ("server.yaml", "site.yaml")
VERSIONS = ("1.28", "1.31")


def manifests(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pods(name):
    """By its Deployment's name, the Pod that it makes."""
    return {
        m["metadata"]["name"]: m["spec"]["template"] for m in manifests(name) if m["kind"] == "Deployment"
    }


def containers(pod):
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


@pytest.mark.parametrize("file", FILES)
def test_manifests_are_valid_by_the_schemas_of_kubernetes(file):
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="the schemas: pip install kubernetes-validate"
    )
    for manifest in manifests(file):
        for version in VERSIONS:
            schemas.validate(manifest, version, strict=True)
    manifest["spec"]["replica"] = 1
    with pytest.raises(schemas.ValidationError):
        schemas.validate(manifest, VERSIONS[0], strict=True)


@pytest.mark.parametrize("file", FILES)
def test_no_process_is_root_or_gains_rights(file):
    for name, pod in pods(file).items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000, name
        assert spec["automountServiceAccountToken"] is False
        for one in containers(pod):
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, one["name"]


@pytest.mark.parametrize("file", FILES)
def test_what_is_named_is_there(file):
    """Volumes that are mounted, claims, ports, and Pods that policies and Services select."""
    found = manifests(file)
    claims = {m["metadata"]["name"] for m in found if m["kind"] == "PersistentVolumeClaim"}
    labels = [pod["metadata"]["labels"] for pod in pods(file).values()]
    for pod in pods(file).values():
        volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
        for one in containers(pod):
            assert {mount["name"] for mount in one["volumeMounts"]} <= volumes.keys()
        for volume in volumes.values():
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim in {*claims, "fedfrozen-site-data", None}  # the site brings its data
    for manifest in found:
        selector = manifest["spec"].get("podSelector", {}).get("matchLabels") or manifest["spec"].get(
            "selector"
        )
        if manifest["kind"] in ("Service", "NetworkPolicy"):
            assert selector in labels, manifest["metadata"]


def test_the_executor_has_no_network_and_the_supernode_reaches_the_server_alone():
    policies = {
        m["metadata"]["name"]: m["spec"] for m in manifests("site.yaml") if m["kind"] == "NetworkPolicy"
    }
    executor, supernode = policies["fedfrozen-executor"], policies["fedfrozen-supernode"]
    assert set(executor["policyTypes"]) == set(supernode["policyTypes"]) == {"Ingress", "Egress"}
    assert executor["ingress"] == executor["egress"] == supernode["ingress"] == []
    assert {p["port"] for rule in supernode["egress"] for p in rule["ports"]} == {8443, 53}
    mounts = {
        name: [m["mountPath"] for c in containers(pod) for m in c["volumeMounts"]]
        for name, pod in pods("site.yaml").items()
    }
    assert "/data" in mounts["fedfrozen-executor"] and "/data" not in mounts["fedfrozen-supernode"]
    assert "/secret" not in mounts["fedfrozen-executor"]


def run_init(pod, tmp_path):
    (one,) = pod["spec"]["initContainers"]
    script = one["command"][-1]
    for place in ("/fedfrozen", "/secret", "/policy"):
        script = re.sub(rf"(?<![\w/]){place}\b", str(tmp_path / place[1:]), script)
    return subprocess.run(["sh", "-euc", script], capture_output=True, text=True, timeout=30, check=True)


@pytest.fixture
def secret(tmp_path):
    """A Secret as Kubernetes mounts it: links to files, readable by the group."""
    for name in ("fedfrozen", "secret", "policy"):
        (tmp_path / name).mkdir()
    content = tmp_path / "secret" / "..data"
    content.mkdir()
    for name in ("node.key", "site.yaml", "policy.yaml", "manifest.sig"):
        (content / name).write_text(f"{name}, first")
        (content / name).chmod(0o440)
        (tmp_path / "secret" / name).symlink_to(Path("..data") / name)
    (tmp_path / "policy" / "policy.yaml").write_text("of the ConfigMap")
    return content


def test_a_kit_is_copied_for_its_owner_alone_and_again_after_a_renewal(tmp_path, secret):
    found = pods("site.yaml")
    kit = tmp_path / "fedfrozen" / "kit"
    run_init(found["fedfrozen-supernode"], tmp_path)
    assert not (kit / "policy.yaml").exists()  # until the executor's Pod brings the site's own
    run_init(found["fedfrozen-executor"], tmp_path)
    assert (kit / "policy.yaml").read_text() == "of the ConfigMap"
    for file in ("node.key", "site.yaml", "policy.yaml", "manifest.sig"):
        assert (kit / file).stat().st_mode & 0o777 == 0o600
    assert kit.stat().st_mode & 0o077 == 0
    (kit / "link.pem").write_text("the site's own")
    (secret / "node.key").chmod(0o640)
    (secret / "node.key").write_text("renewed")
    run_init(found["fedfrozen-supernode"], tmp_path)
    assert (kit / "node.key").read_text() == "renewed"
    assert (kit / "link.pem").read_text() == "the site's own"
    assert (kit / "policy.yaml").read_text() == "of the ConfigMap"
    assert {path.name for path in kit.iterdir()} == {
        *("node.key", "site.yaml", "policy.yaml", "manifest.sig", "link.pem", "run")
    }


def test_the_servers_kit_is_copied_whole(tmp_path, secret):
    run_init(pods("server.yaml")["fedfrozen-server"], tmp_path)
    kit = tmp_path / "fedfrozen" / "kit"
    assert (kit / "policy.yaml").read_text() == "policy.yaml, first"
    assert (kit / "node.key").stat().st_mode & 0o777 == 0o600


def alive(file, container, kit):
    """Whether the probe finds it alive."""
    (one,) = [c for pod in pods(file).values() for c in containers(pod) if c["name"] == container]
    assert one["startupProbe"]["exec"] == one["livenessProbe"]["exec"]
    assert one["workingDir"] == "/fedfrozen/kit"
    command, flag, code = one["startupProbe"]["exec"]["command"]
    assert (command, flag) == ("python3", "-c")
    done = subprocess.run(
        [sys.executable, "-c", code.replace("/fedfrozen/kit", str(kit))], capture_output=True, check=False
    )
    return done.returncode == 0


@pytest.mark.parametrize("part", ["supernode", "executor"])
def test_a_process_of_a_site_is_alive_while_its_note_is_fresh(tmp_path, part):
    (tmp_path / "run").mkdir()
    assert not alive("site.yaml", part, tmp_path)
    note = Note(tmp_path / "run", part)
    note.write("waiting", 30)
    assert alive("site.yaml", part, tmp_path)
    note.write("waiting", -200)
    assert not alive("site.yaml", part, tmp_path)


def test_the_superlink_is_alive_while_it_answers(tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    assert not alive("server.yaml", "superlink", tmp_path)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def address_string(self):
            return "a socket"

        def log_message(self, *words):
            """Nothing."""

    if len(os.fsencode(place / "superlink.sock")) > 100:
        pytest.skip("this machine's temporary folder is too deep for a socket")
    with socketserver.UnixStreamServer(str(place / "superlink.sock"), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert alive("server.yaml", "superlink", tmp_path)
        server.shutdown()
    assert not alive("server.yaml", "superlink", tmp_path)
