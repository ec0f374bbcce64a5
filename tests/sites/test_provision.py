"""Kits: what is in them, who can read it, and that the installed Flower takes every flag they use."""

import argparse
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from flwr.supercore.cli.flower_superexec import _parse_args as superexec_parser
from flwr.supercore.primitives.asymmetric import uses_nist_ec_curve
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink as superlink_parser

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites.admitted import admitted
from fedfrozen_app.sites.authority import Authority, Passphrase
from fedfrozen_app.sites.federation_plan import FederationPlan, Party, Site, read_federation
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.kit_writer import write_kits
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.request import key_of
from fedfrozen_app.sites.server import FLAGS
from fedfrozen_app.sites.site_check import check_tls
from tests.sites.processes import PLAN, wait_until


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    (folder / "federation.yaml").write_text(yaml.safe_dump(PLAN))
    assert command(["provision", str(folder / "federation.yaml"), "-o", str(folder / "kits")]) == 0
    return folder / "kits"


def test_a_folder_for_each_party(kits):
    assert sorted(path.name for path in kits.iterdir()) == [
        "authority",
        "north",
        "operator",
        "server",
        "south",
    ]
    for name in ("README.md", "start.sh", "docker-compose.yaml"):
        assert all((kits / party / name).exists() for party in ("server", "north", "south"))
    assert "server admit" in (kits / "server" / "README.md").read_text()
    assert (kits / "north" / "README.md").read_text().count("\n1. ") == 1


def test_secrets_are_their_owner_s_alone_and_in_one_place(kits):
    secret = {"ca.key", "server.key", "node.key", "operator.key", "superexec.secret"}
    found = [path for path in kits.rglob("*") if path.is_file()]
    for path in found:
        assert (stat.S_IMODE(path.stat().st_mode) == 0o600) == (path.name in secret), path
    private = {path: path.read_bytes() for path in found if path.name in secret}
    for path, content in private.items():
        assert [other for other in found if other.read_bytes() == content] == [path]
    assert len([path for path in found if b"PRIVATE KEY" in path.read_bytes()]) == 5


def test_keys_are_what_flower_takes(kits):
    key = key_of(kits / "north" / "node.key")
    assert uses_nist_ec_curve(key.public_key()) and key.curve.name == "secp384r1"
    known = {name: found.public_key() for name, found in admitted(kits / "server").items()}
    assert sorted(known) == ["north", "operator", "south"]
    assert known["north"] == key.public_key() != known["south"]


def test_the_certificate_names_the_server_and_hangs_on_the_authority(kits):
    certificate = x509.load_pem_x509_certificate((kits / "server" / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.1.2.3", "127.0.0.1"]
    verify = ["openssl", "verify", "-x509_strict", "-CAfile", kits / "north" / "ca.crt"]
    done = subprocess.run(
        [*verify, kits / "server" / "server.crt"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


PARSERS = {
    "flower-superlink": superlink_parser,
    "flower-superexec": superexec_parser,
}


@pytest.mark.parametrize(
    "name",
    ["flower-superlink", "flower-superexec"],
)
def test_flower_takes_every_flag(kits, name):
    if name == "flower-superexec":
        text = (kits / "server" / "superexec.sh").read_text().replace("\\\n", " ")
        (line,) = re.findall(r"^exec (flower-.*)$", text, re.MULTILINE)
        _, *words = line.split()
    else:
        words = FLAGS.split()
    parser = PARSERS[name]()
    assert isinstance(parser, argparse.ArgumentParser)
    parsed = parser.parse_args(words)
    helped = parser.format_help()
    for flag in (word for word in words if word.startswith("--")):
        about = helped[helped.rindex(f"  {flag}") :].split("\n  --")[0]
        assert "eprecated" not in about, flag
    if name != "flower-superexec":
        assert parsed.isolation == "process" and parsed.insecure in (None, False)


def test_scripts_are_shell_and_units_come_back(kits):
    for path in kits.rglob("*.sh"):
        for shell in ("sh", "bash"):
            assert subprocess.run([shell, "-n", path], check=False).returncode == 0, path
    for path in kits.rglob("*.service"):
        text = path.read_text()
        assert "Restart=always" in text and "RestartSec=15" in text and "StartLimitIntervalSec=0" in text
    for path in kits.rglob("docker-compose.yaml"):
        assert all(
            service["restart"] == "always"
            for service in yaml.safe_load(path.read_text())["services"].values()
        )
    nginx = (kits / "server" / "nginx.conf").read_text()
    inside = re.findall(r"location (\S+)", nginx)
    assert inside == ["/", "/v1/fleet/", "/v1/control/", "/", "/v1/runtime/"]
    for path in kits.rglob("docker-compose.yaml"):
        for service in yaml.safe_load(path.read_text())["services"].values():
            assert service["cap_drop"] == ["ALL"] and service["user"] == "${UID:-1000}:${GID:-1000}"
    site = yaml.safe_load((kits / "north" / "docker-compose.yaml").read_text())
    assert site["services"]["executor"]["network_mode"] == "none"


def test_a_server_without_nginx_says_so(kits, tmp_path):
    """The script itself, where only `dirname` is on the PATH."""
    script = tmp_path / "proxy.sh"
    script.write_text((kits / "server" / "proxy.sh").read_text().replace(":/usr/local/sbin:/usr/sbin", ""))
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    shell = shutil.which("sh")
    done = subprocess.run([shell, script], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2 and "nginx is not installed" in done.stderr and "apt install" in done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_every_unit(kits, tmp_path):
    """And finds little to say against the executor's: no network, nothing to write but its own folder."""
    for path in kits.rglob("*.service"):
        # As it would stand, but for the folder and the account, which are not here.
        text = re.sub(r"/opt/fedfrozen/\w+", str(tmp_path), path.read_text()).replace("User=fedfrozen\n", "")
        unit = tmp_path / f"{path.parent.name}-{path.name}"
        unit.write_text(text)
        verify = ["systemd-analyze", "verify", "--recursive-errors=no", "--man=no", str(unit)]
        done = subprocess.run(verify, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and path.name not in done.stderr, done.stderr
    executor = (kits / "north" / "fedfrozen-executor.service").read_text()
    for line in ("PrivateNetwork=yes", "IPAddressDeny=any", "RestrictAddressFamilies=AF_UNIX\n"):
        assert line in executor


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
@pytest.mark.parametrize("parties", [0, 500])
def test_nginx_takes_its_settings_and_a_long_list(kits, tmp_path, parties):
    folder = tmp_path / "server"
    shutil.copytree(kits / "server", folder)
    numbers = (f'"{x509.random_serial_number():040X}" "site s{number}";\n' for number in range(parties))
    (folder / "admitted.conf").write_text("".join(numbers))
    line = ["nginx", "-t", "-p", str(folder), "-c", "nginx.conf"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "[warn]" not in done.stderr, done.stderr


@pytest.mark.parametrize("end", ["the executor fails", "a signal"])
def test_both_processes_of_a_kit_end_together(kits, tmp_path, end):
    """A SuperNode without an executor would be a node that takes orders and never answers."""
    shutil.copy(kits / "north" / "start.sh", tmp_path)
    (tmp_path / "supernode.sh").write_text("exec sleep 60")
    (tmp_path / "executor.sh").write_text("exit 2" if "fails" in end else "touch up; exec sleep 60")
    started = subprocess.Popen(["sh", str(tmp_path / "start.sh")], start_new_session=True)
    try:
        if end == "a signal":
            wait_until((tmp_path / "up").exists)
            started.terminate()
        assert started.wait(30) == (143 if end == "a signal" else 1)
        wait_until(lambda: not running_in(started.pid))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


def test_ending_a_kit_ends_nobody_else(kits, tmp_path):
    """A script that starts it shares its process group, and is not its to end."""
    shutil.copy(kits / "north" / "start.sh", tmp_path)
    (tmp_path / "supernode.sh").write_text("exec sleep 60")
    (tmp_path / "executor.sh").write_text("exit 2")
    (tmp_path / "caller.sh").write_text("sh start.sh; echo $? > ended; sleep 60 & wait")
    caller = subprocess.Popen(["sh", "caller.sh"], cwd=tmp_path, start_new_session=True)
    try:
        wait_until(lambda: (tmp_path / "ended").exists() and (tmp_path / "ended").read_text() == "1\n")
        assert caller.poll() is None
    finally:
        os.killpg(caller.pid, signal.SIGKILL)
        caller.wait()


def running_in(group: int) -> bool:
    """Whether a process of the group is there that is more than an entry waiting to be read."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may be gone meanwhile
            state, _, own, *_ = path.read_text().rpartition(")")[2].split()
            if int(own) == group and state != "Z":
                return True
    return False


def test_a_kit_reads_back(kits):
    kit = Kit.read(kits / "north")
    assert (kit.name, kit.superlink) == ("north", "fed.example.org:8443")
    view = kit.view(None)
    assert view == kit.view("main") and (view.kind, view.path) == ("images", str(kits / "north" / "data"))
    assert kit.view("other") is None
    policy = Policy.read(kit.policy)
    assert len(policy.bundles[0]) == 64 and policy.min_examples == 50
    assert policy.approval == "policy"  # a try shall simply run; `test_keys.py` has a real site's


def test_a_kit_of_before_is_told_how_to_renew_itself(kits, tmp_path):
    """Its views were one `data:`; everything else it holds goes on as it is."""
    shutil.copytree(kits / "north", tmp_path / "north")
    path = tmp_path / "north" / "site.yaml"
    found = yaml.safe_load(path.read_text())
    del found["views"]
    path.write_text(yaml.safe_dump(found | {"data": {"kind": "text", "path": "notes"}}))
    with pytest.raises(UserError, match="as kits did before views") as error:
        Kit.read(path.parent)
    shown = str(error.value)
    assert "main: {kind: text, path: notes, classes: [" in shown and "stay as they are" in shown
    assert "\n" not in shown  # one sentence, on one line


def test_what_a_policy_leaves_out_is_answered_strictly(kits, tmp_path):
    path = tmp_path / "policy.yaml"
    needed = ("strategies", "upload_roles", "min_examples", "rounds_per_day", "max_epsilon", "bundles")
    found = yaml.safe_load((kits / "north" / "policy.yaml").read_text())
    path.write_text(yaml.safe_dump({key: found[key] for key in needed}))
    policy = Policy.read(path)
    assert policy.privacy_required and policy.approval == "ask" and policy.min_people == 20
    assert not policy.metrics and not policy.downloads and policy.max_delta == 1e-5


def test_again_adds_a_site_and_keeps_the_rest(kits, tmp_path):
    plan = tmp_path / "federation.yaml"
    plan.write_text(yaml.safe_dump(PLAN | {"sites": ["north", "south", "west"]}))
    (kits / "north" / "policy.yaml").write_text((kits / "north" / "policy.yaml").read_text() + "# mine\n")
    before = {
        path: path.read_bytes()
        for path in kits.rglob("*")
        if path.is_file() and path.parent.name not in ("server", "authority")
    }
    certificate = (kits / "server" / "server.crt").read_bytes()
    assert command(["provision", str(plan), "-o", str(kits)]) == 0
    assert all(path.read_bytes() == content for path, content in before.items())
    assert (kits / "west" / "node.key").exists() and "west" in admitted(kits / "server")
    assert (kits / "server" / "server.crt").read_bytes() == certificate

    assert command(["provision", str(plan), "-o", str(kits), "--renew", "server"]) == 0
    assert (kits / "server" / "server.crt").read_bytes() != certificate
    key = (kits / "north" / "node.key").read_bytes()
    assert command(["provision", str(plan), "-o", str(kits), "--renew", "north"]) == 0
    assert (kits / "north" / "node.key").read_bytes() != key
    assert (kits / "north" / "policy.yaml").read_text().endswith("# mine\n")
    assert command(["provision", str(plan), "-o", str(kits), "--renew", "nobody"]) == 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"server": None}, "where the server is"),
        ({"server": {"address": "x"}}, "where the server is"),
        ({"server": {"address": "x", "port": "y"}}, "server.port must be a number"),
        ({"server": {"address": "x; rm -rf /", "port": 1}}, "no host name"),
        ({"server": {"address": "fed.example.org:8443", "port": 1}}, "no host name"),
        ({"server": {"address": "x", "port": 1, "names": "fed2.example.org"}}, "server.names must be a list"),
        ({"server": {"address": "x", "port": 1, "names": None}}, "server.names must be a list"),
        ({"server": {"address": "x", "port": 8000}}, "need one each"),
        ({"server": {"address": "x", "port": 1, "hosts": []}}, "unknown key hosts"),
        ({"sites": []}, "must name the sites"),
        ({"sites": ["server"]}, "cannot be used"),
        ({"sites": ["../north"]}, "cannot be used"),
        ({"sites": ["north", "north"]}, "named twice"),
        ({"sites": [{"name": "north", "key": 1}]}, "unknown key key"),
        ({"sites": [{"name": "north", "port": 9094}]}, "unknown key port"),
        ({"operators": ["north"]}, "the name of another party"),
        ({"operators": ["server"]}, "the name of another party"),
        ({"operators": ["A B"]}, "operators must be a list of names"),
        ({"sites": [{"name": "north", "data": "images"}]}, "the kind and the path of the data"),
        ({"valid_days": 0}, "valid_days=0"),
        ({"more": 1}, "unknown key more"),
    ],
)
def test_a_bad_file_ends_with_a_sentence(tmp_path, change, sentence):
    path = tmp_path / "federation.yaml"
    path.write_text(yaml.safe_dump(PLAN | change))
    with pytest.raises(UserError, match=re.escape(sentence)):
        read_federation(path)


def test_an_authority_that_is_off_line_is_not_replaced(kits, tmp_path, capsys):
    """A new one would vouch for a server that no site believes."""
    folder = tmp_path / "kits"
    shutil.copytree(kits, folder)
    (folder / "authority").rename(tmp_path / "off-line")
    plan = tmp_path / "federation.yaml"
    plan.write_text(yaml.safe_dump(PLAN))
    before = (folder / "server" / "server.crt").read_bytes()
    assert command(["provision", str(plan), "-o", str(folder), "--renew", "server"]) == 2
    assert "authority is not here" in capsys.readouterr().err
    assert not (folder / "authority").exists()
    assert (folder / "server" / "server.crt").read_bytes() == before
    (tmp_path / "off-line").rename(folder / "authority")
    (folder / "authority" / "ca.crt").write_text("cut")
    assert command(["provision", str(plan), "-o", str(folder)]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("harm", ["missing", "garbage"])
def test_a_check_goes_on_where_a_file_of_the_kit_is_bad(kits, tmp_path, capsys, harm):
    folder = tmp_path / "north"
    shutil.copytree(kits / "north", folder)
    site = folder / "site.yaml"
    site.write_text(site.read_text().replace("fed.example.org:8443", "127.0.0.1:1"))
    (folder / "ca.crt").unlink() if harm == "missing" else (folder / "ca.crt").write_text("garbage")
    (folder / "var").write_text("a file where a folder should be")
    assert command(["site", "check", str(folder)]) == 2
    told = dict(re.findall(r"^FAILED  ([\w ]+): (.*)$", capsys.readouterr().out, re.MULTILINE))
    assert sorted(told) == ["TLS", "certificate", "data", "disk", "key", "kit"]
    assert all("ca.crt" in told[name] and "cannot be read" in told[name] for name in ("TLS", "key", "kit"))
    assert "cannot be written" in told["disk"]


def test_a_check_tells_an_expired_certificate_from_a_false_one(tmp_path):
    plan = FederationPlan(Party("127.0.0.1", 1), (Site("north"),))
    write_kits(plan, tmp_path)
    authority = Authority.read(tmp_path / "authority", Passphrase())
    public = key_of(tmp_path / "server" / "server.key").public_key()
    past = authority.issue(public, "server", "server", 0, ("127.0.0.1",))  # expired when it is read
    (tmp_path / "server" / "server.crt").write_bytes(past.public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server" / "server.crt", tmp_path / "server" / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kit = replace(Kit.read(tmp_path / "north"), superlink=f"127.0.0.1:{listener.getsockname()[1]}")

        def greet():
            with suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True):
                pass

        thread = Thread(target=greet)
        thread.start()
        with pytest.raises(UserError, match=r"has expired.*site renew"):
            check_tls(kit)
        thread.join()


def test_no_file_and_no_yaml(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_federation(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("server: [")
    with pytest.raises(UserError, match="not valid YAML"):
        read_federation(tmp_path / "bad.yaml")
