"""Keys where they belong: made by each party, certified by an authority, checked, renewed, rotated."""

import base64
import json
import shutil
import stat
import subprocess

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.certificates import (
    fingerprint,
    problem_of,
    read_certificate,
    read_trusted,
    serial,
    subject_of,
    who,
)
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites import manifest
from fedfrozen_app.sites.admitted import admit, admitted
from fedfrozen_app.sites.authority import VARIABLE, Authority, Passphrase
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.request import KEYS, certificate_file, key_of

PLAN = {
    "server": {"address": "fed.example.org", "port": 8443},
    "sites": ["north", "south"],
    "operators": ["ana"],
}
PARTIES = {"server": "server", "north": "site", "south": "site", "ana": "operator"}


class World:
    """An authority's folder, and one for each party, which never see each other's."""

    def __init__(self, folder):
        self.folder = folder
        self.kits = folder / "authority_machine"
        self.plan = folder / "federation.yaml"

    def party(self, name):
        return self.folder / f"machine_of_{name}" / name

    def print_of(self, name):
        key = self.party(name) / KEYS[PARTIES[name]]
        following = key.with_name(f"{key.name}.next")
        return fingerprint(key_of(following if following.exists() else key).public_key())

    def authority(self):
        return Authority.read(self.kits / "authority", Passphrase())

    def request(self, name):
        words = ["site", "request", name, "--as", PARTIES[name], "-o", str(self.party(name))]
        assert command(words) == 0
        return self.party(name) / f"{name}.csr"

    def sign(self, name, told=None):
        csr = str(self.party(name) / f"{name}.csr")
        line = ["provision", "sign", csr, str(self.plan), "-o", str(self.kits)]
        return command([*line, "--fingerprint", told or self.print_of(name)])

    def install(self, name, *more):
        return command(["site", "install", str(self.kits / name), str(self.party(name)), *more])

    def first_time(self):
        return ["--authority", fingerprint(self.authority().current.key.public_key())]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("keys"))
    world.plan.write_text(yaml.safe_dump(PLAN))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "correct horse battery")
        assert command(["provision", "init", str(world.plan), "-o", str(world.kits)]) == 0
        for name in PARTIES:
            world.request(name)
            assert world.sign(name) == 0
            assert world.install(name, *world.first_time()) == 0
    return world.folder


@pytest.fixture
def world(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "correct horse battery")
    shutil.copytree(prepared, tmp_path / "world")
    return World(tmp_path / "world")


# The way to a kit ------------------------------------------------------------------------------------------


def test_every_key_is_on_its_party_s_machine_alone(world):
    for name, role in PARTIES.items():
        key = world.party(name) / KEYS[role]
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert stat.S_IMODE(world.party(name).stat().st_mode) == 0o700
        assert key_of(key).public_key() == read_certificate(key.with_suffix(".crt")).public_key()
    handed = [path for path in world.kits.rglob("*") if path.is_file()]
    assert [path.name for path in handed if b"PRIVATE" in path.read_bytes()] == ["ca.key"]
    assert b"ENCRYPTED" in (world.kits / "authority" / "ca.key").read_bytes()


def test_certificates_name_party_and_role_and_hang_on_the_authority(world):
    for name, role in PARTIES.items():
        path = world.party(name) / certificate_file(role)
        certificate = read_certificate(path)
        assert who(certificate.subject) == (name, role)
        assert 396 <= (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days <= 397
        purpose = "sslserver" if role == "server" else "sslclient"
        verify = ["openssl", "verify", "-x509_strict", "-purpose", purpose]
        done = subprocess.run(
            [*verify, "-CAfile", world.party(name) / "ca.crt", path], capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        # A site's certificate is no server's, and the other way round.
        other = "sslclient" if role == "server" else "sslserver"
        line = ["openssl", "verify", "-purpose", other, "-CAfile", world.party(name) / "ca.crt", path]
        assert subprocess.run(line, capture_output=True, check=False).returncode != 0


def test_a_new_site_begins_strictly_and_a_try_simply_runs(world, tmp_path):
    policy = Policy.read(world.party("north") / "policy.yaml")
    assert policy.privacy_required and policy.strategies == ("fedfrozen",) and not policy.downloads
    assert policy.approval == "ask" and not policy.metrics
    assert not {"query", "key", "embedding"} & set(policy.upload_roles)
    assert command(["provision", str(world.plan), "-o", str(tmp_path / "try")]) == 0
    assert not Policy.read(tmp_path / "try" / "north" / "policy.yaml").privacy_required


def test_the_one_command_way_says_what_it_is(world, tmp_path, capsys):
    assert command(["provision", str(world.plan), "-o", str(tmp_path / "try")]) == 0
    assert "whoever ran it has the key of every site" in capsys.readouterr().out


# What is not signed ------------------------------------------------------------------------------------


def csr(path, name="north", role="site", key=None, names=None):
    key = key or ec.generate_private_key(ec.SECP384R1())
    made = x509.CertificateSigningRequestBuilder().subject_name(names or subject_of(name, role))
    path.write_bytes(made.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))
    return key


def test_a_request_with_another_key_than_the_party_told_is_not_signed(world, capsys):
    """Somebody changed the request on its way."""
    told = world.print_of("north")
    csr(world.party("north") / "north.csr")
    before = (world.kits / "north" / "node.crt").read_bytes()
    assert world.sign("north", told) == 2
    assert "not what north told" in capsys.readouterr().err
    assert (world.kits / "north" / "node.crt").read_bytes() == before
    # Without a fingerprint, and nobody there to ask, neither.
    line = ["provision", "sign", str(world.party("north") / "north.csr"), str(world.plan)]
    assert command([*line, "-o", str(world.kits)]) == 2
    assert "Ask north for its key's fingerprint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "role", "sentence"),
    [
        ("mallory", "site", "has no site mallory"),
        ("north", "operator", "has no operator north"),
        ("north", "server", "has no server north"),
        ("ana", "site", "has no site ana"),
        ("north", "authority", "names no party"),
    ],
)
def test_who_is_not_in_the_federation_gets_nothing(world, capsys, name, role, sentence):
    path = world.folder / "x.csr"
    key = csr(path, name, role)
    line = ["provision", "sign", str(path), str(world.plan), "-o", str(world.kits)]
    assert command([*line, "--fingerprint", fingerprint(key.public_key())]) == 2
    assert sentence in capsys.readouterr().err
    assert not (world.kits / "mallory").exists()


def test_a_request_that_is_none(world, capsys):
    path = world.folder / "x.csr"
    line = ["provision", "sign", str(path), str(world.plan), "-o", str(world.kits)]
    assert command(line) == 2 and "no signing request" in capsys.readouterr().err
    path.write_text("-----BEGIN")
    assert command(line) == 2 and "no signing request" in capsys.readouterr().err
    csr(path, key=ec.generate_private_key(ec.SECP256R1()))
    assert command(line) == 2 and "another kind of key" in capsys.readouterr().err
    # Its public key replaced by another's, whose holder signed nothing.
    csr(path)
    good = x509.load_pem_x509_csr(path.read_bytes()).public_bytes(serialization.Encoding.DER)
    broken = good[:-4] + bytes(4)
    path.write_bytes(
        b"-----BEGIN CERTIFICATE REQUEST-----\n"
        + base64.encodebytes(broken)
        + b"-----END CERTIFICATE REQUEST-----\n"
    )
    assert command(line) == 2
    assert capsys.readouterr().err.count("fedfrozen:") == 1


def test_the_passphrase(world, capsys, monkeypatch, tmp_path):
    assert command(["site", "renew", str(world.party("north"))]) == 0
    monkeypatch.setenv(VARIABLE, "wrong horse battery")
    assert world.sign("north") == 2 and "passphrase is another" in capsys.readouterr().err
    monkeypatch.setenv(VARIABLE, "short")
    assert world.sign("north") == 2 and "fewer than 8" in capsys.readouterr().err
    monkeypatch.delenv(VARIABLE)
    assert world.sign("north") == 2 and "--passphrase-file FILE" in capsys.readouterr().err
    secret = tmp_path / "secret"
    secret.write_text("correct horse battery\n")
    line = ["provision", "sign", str(world.party("north") / "north.csr"), str(world.plan), "-o"]
    line += [str(world.kits), "--fingerprint", world.print_of("north"), "--passphrase-file", str(secret)]
    assert command(line) == 0
    assert command(["provision", "init", str(world.plan), "-o", str(tmp_path / "more")]) == 2
    assert not (tmp_path / "more" / "authority").exists()


# The signed list -------------------------------------------------------------------------------------------


def test_a_kit_that_was_changed_on_its_way_is_not_installed(world, capsys):
    assert command(["site", "renew", str(world.party("north"))]) == 0
    assert world.sign("north") == 0
    received, kit = world.kits / "north", world.party("north")
    before = {path.name: path.read_bytes() for path in kit.iterdir() if path.is_file()}
    for name in ("supernode.sh", "policy.yaml", "node.crt", "manifest.sig"):
        good = (received / name).read_bytes()
        (received / name).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        assert world.install("north") == 2, name
        (received / name).write_bytes(good)
    # A list that its sender made, signed by an authority of its own.
    strange = Authority.make(world.folder / "strange", None)
    good = {path.name: path.read_bytes() for path in received.iterdir()}
    (received / "ca.crt").write_bytes(strange.trusted())
    manifest.sign(received, list(manifest.read(kit, kit / "ca.crt").files), strange.current, "north", "site")
    capsys.readouterr()
    assert world.install("north") == 2
    assert "is not signed by the authority" in capsys.readouterr().err
    assert world.install("north", *world.first_time()) == 2
    assert "is of another authority" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in kit.iterdir() if path.is_file()} == before
    for name, content in good.items():
        (received / name).write_bytes(content)
    assert world.install("north") == 0


def test_the_first_time_the_authority_s_fingerprint_must_be_told(world, capsys):
    fresh = world.folder / "fresh"
    fresh.mkdir()
    shutil.copy(world.party("north") / "node.key", fresh)
    assert command(["site", "install", str(world.kits / "north"), str(fresh)]) == 2
    assert "compare that with whoever keeps the authority" in capsys.readouterr().err
    assert [path.name for path in fresh.iterdir()] == ["node.key"]


def test_the_fingerprint_that_is_shown_is_the_signer_s(world, capsys, monkeypatch):
    """A ca.crt that names the true authority first, and then the stranger who signed this kit."""
    fresh, received = world.folder / "fresh", world.kits / "north"
    fresh.mkdir()
    shutil.copy(world.party("north") / "node.key", fresh)
    strange = Authority.make(world.folder / "strange", None)
    files = list(manifest.read(received, received / "ca.crt").files)
    (received / "ca.crt").write_bytes(world.authority().trusted() + strange.trusted())
    (received / "supernode.sh").write_text("a stranger's")
    manifest.sign(received, files, strange.current, "north", "site")
    true = fingerprint(world.authority().current.key.public_key())
    shown = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    # A person who compares with care what is on the screen.
    monkeypatch.setattr(
        "builtins.input",
        lambda text: shown.append(capsys.readouterr().out) or ("y" if true in shown[0] else "n"),
    )
    assert command(["site", "install", str(received), str(fresh)]) == 2
    assert fingerprint(strange.current.key.public_key()) in shown[0] and not (fresh / "supernode.sh").exists()


def test_a_list_that_names_files_elsewhere_is_refused(world):
    """Even the authority writes into the kit alone."""
    received = world.kits / "north"
    (world.kits / "escape.sh").write_text("x")
    (received / "policy.yaml").unlink()
    manifest.sign(
        received, ["node.crt", "ca.crt", "../escape.sh"], world.authority().current, "north", "site"
    )
    assert world.install("north") == 2
    assert not (world.party("north").parent / "escape.sh").exists()


def test_another_s_kit_does_not_fit(world, capsys):
    south = world.kits / "south"
    assert command(["site", "install", str(south), str(world.party("north"))]) == 2
    assert "for another key" in capsys.readouterr().err
    assert command(["site", "install", str(world.kits / "ana"), str(world.party("north"))]) == 2
    assert "is for the operator ana" in capsys.readouterr().err


def test_what_is_the_site_s_own_may_change_and_nothing_else(world):
    kit = world.party("north")
    for name in manifest.YOURS:
        (kit / name).write_text((kit / name).read_text() + "# mine\n")
    manifest.check(kit)
    for name in manifest.check(kit).files:
        good = (kit / name).read_bytes()
        (kit / name).write_bytes(good + b"\n")
        with pytest.raises(UserError, match="is not as the authority signed it"):
            manifest.check(kit)
        (kit / name).unlink()
        with pytest.raises(UserError, match=r"is not as the authority signed it|cannot be read"):
            manifest.check(kit)
        (kit / name).write_bytes(good)
    manifest.check(kit)


# Renewal and rotation ------------------------------------------------------------------------------------


def test_renewal_keeps_what_is_the_site_s_and_can_bring_a_new_key(world):
    kit = world.party("north")
    (kit / "policy.yaml").write_text((kit / "policy.yaml").read_text() + "# mine\n")
    (kit / "var").mkdir()
    (kit / "var" / "audit.jsonl").write_text("{}\n")
    key, certificate = (kit / "node.key").read_bytes(), read_certificate(kit / "node.crt")
    assert command(["site", "renew", str(kit)]) == 0
    assert world.sign("north") == 0 and world.install("north") == 0
    assert (kit / "node.key").read_bytes() == key
    assert read_certificate(kit / "node.crt").serial_number != certificate.serial_number
    assert command(["site", "renew", str(kit), "--new-key"]) == 0
    assert (kit / "node.key").read_bytes() == key  # which counts until the certificate is there
    assert world.sign("north") == 0 and world.install("north") == 0
    assert (kit / "node.key").read_bytes() != key and not (kit / "node.key.next").exists()
    assert key_of(kit / "node.key").public_key() == read_certificate(kit / "node.crt").public_key()
    assert (kit / "policy.yaml").read_text().endswith("# mine\n")
    assert (kit / "var" / "audit.jsonl").read_text() == "{}\n"


def test_the_authority_is_rotated_with_an_overlap(world, capsys):
    old = read_trusted(world.party("south") / "ca.crt")
    server_certificate = (world.party("server") / "server.crt").read_bytes()
    output = ["-o", str(world.kits)]
    assert command(["provision", "rotate", *output, "--finish"]) == 2
    assert command(["provision", "rotate", *output]) == 0
    assert command(["provision", "rotate", *output]) == 2  # one at a time
    assert b"ENCRYPTED" in (world.kits / "authority" / "next.key").read_bytes()

    def renew(name):
        assert command(["site", "renew", str(world.party(name))]) == 0
        assert world.sign(name) == 0 and world.install(name) == 0

    renew("server")
    renew("north")
    both = read_trusted(world.party("server") / "ca.crt")
    assert len(both) == 2 and both[0] == old[0]
    # The server shows what a site that knows the old authority alone believes, and believes both kinds.
    shown = read_certificate(world.party("server") / "server.crt")
    assert shown.public_bytes(serialization.Encoding.PEM) != server_certificate
    assert problem_of(shown, old) is None
    assert problem_of(read_certificate(world.party("south") / "node.crt"), both) is None
    north = read_certificate(world.party("north") / "node.crt")
    assert problem_of(north, both) is None and problem_of(north, old) is not None
    assert admit(world.party("server"), north.public_bytes(serialization.Encoding.PEM)) == ("north", "site")

    capsys.readouterr()
    assert command(["provision", "rotate", *output, "--finish"]) == 2
    assert "ana, south would be shut out" in capsys.readouterr().err
    renew("south")
    renew("ana")
    assert command(["provision", "rotate", *output, "--finish"]) == 0
    renew("server")
    new = read_trusted(world.party("server") / "ca.crt")
    assert new == both[1:]
    shown = read_certificate(world.party("server") / "server.crt")
    for name in ("north", "south", "ana"):
        assert problem_of(shown, read_trusted(world.party(name) / "ca.crt")) is None
        manifest.check(world.party(name))
    assert list((world.kits / "authority").glob("retired-*/ca.key"))


def test_a_kit_of_before_is_renewed_and_loses_nothing(world, capsys):
    """OpenSSH's form of the key, a port, a secret, no list: one sentence, and then the usual way."""
    kit = world.party("north")
    key = key_of(kit / "node.key")
    form = serialization.PrivateFormat.OpenSSH
    older = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    (kit / "node.key").write_bytes(older)
    for name in ("manifest.json", "manifest.sig", "node.crt"):
        (kit / name).unlink()
    (kit / "executor.secret").write_bytes(bytes(32))
    site = kit / "site.yaml"
    site.write_text(site.read_text() + "port: 9094\n")
    policy = (kit / "policy.yaml").read_bytes()
    assert command(["site", "exec", str(kit), "--unguarded"]) == 2
    assert "is of an older kit: delete its line `port`, run `fedfrozen site renew`" in capsys.readouterr().err
    site.write_text(site.read_text().replace("port: 9094\n", ""))
    assert command(["site", "exec", str(kit), "--unguarded"]) == 2
    assert "Renew it with `fedfrozen site renew`" in capsys.readouterr().err
    assert command(["site", "renew", str(kit)]) == 0
    assert world.sign("north") == 0 and world.install("north") == 0
    assert key_of(kit / "node.key").private_numbers() == key.private_numbers()
    assert (kit / "policy.yaml").read_bytes() == policy and not (kit / "executor.secret").exists()
    assert Kit.read(kit).name == manifest.check(kit).name == "north"


# Whom the server lets in -----------------------------------------------------------------------------------


def test_the_server_admits_what_the_authority_signed_and_nothing_else(world, tmp_path):
    server = world.party("server")
    pem = {name: (world.party(name) / certificate_file(role)).read_bytes() for name, role in PARTIES.items()}
    assert admit(server, pem["north"]) == ("north", "site")
    assert admit(server, pem["ana"]) == ("ana", "operator")
    line = f'"{serial(read_certificate(world.party("north") / "node.crt"))}" "site north";\n'
    assert line in (server / "admitted.conf").read_text()
    strange = Authority.make(tmp_path / "strange", None)
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    for certificate, sentence in [
        (strange.issue(key, "north", "site", 9), "not of this federation's authority"),
        (world.authority().issue(key, "north", "site", 0), "it expired on"),
        (world.authority().issue(key, 'x" "operator y";#', "site", 9), "no site and no operator"),
        (world.authority().issue(key, "server", "server", 9), "no site and no operator"),
    ]:
        with pytest.raises(UserError, match=sentence):
            admit(server, certificate.public_bytes(serialization.Encoding.PEM))
    assert sorted(admitted(server)) == ["ana", "north"]
    # A renewed certificate takes the place of the one before.
    newer = world.authority().issue(key, "north", "site", 9)
    admit(server, newer.public_bytes(serialization.Encoding.PEM))
    assert line not in (server / "admitted.conf").read_text()
    assert json.loads((world.kits / "authority" / "issued.json").read_text())["north"]["serial"] == serial(
        newer
    )
