"""A client leaves a finished run: what is left is a run that it never joined."""

import json
import shutil

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core import signing
from fedfrozen_app.files import checkpoint
from fedfrozen_app.files.rows import first_rounds
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.server.membership import Invitation, Membership
from fedfrozen_app.server.transport import Transport
from tests.app.test_pages_run import ROOT, python_blocks
from tests.conftest import SMALL, Run, same_bits
from tests.resuming import killed_before_checkpoint, without_times

WORDS = [*SMALL, "num_clients=5", "num_rounds=4", "participation=0.4", "baseline=false", "seed=3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run in which clients join one after another."""
    folder = tmp_path_factory.mktemp("forget") / "run"
    assert command([*WORDS, "checkpoint.rollback=true", "checkpoint.keep=1", f"output_dir={folder}"]) == 0
    return Run(folder)


@pytest.fixture(scope="module")
def left(finished, tmp_path_factory):
    """The same run after the client that joined last has left, with a signed statement."""
    out = tmp_path_factory.mktemp("left") / "without"
    key = out.with_name("key.pem")
    key.write_bytes(
        ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    client, _ = latest(finished)
    words = ["forget", str(finished.folder), "--client", client, "--out", str(out), "--key", str(key)]
    assert command(words) == 0
    return Run(out)


@pytest.fixture
def never_there(monkeypatch):
    """From here on the node of this client does not exist."""

    def leave(client):
        real = InProcessGrid.get_node_ids
        monkeypatch.setattr(
            InProcessGrid, "get_node_ids", lambda self: [n for n in real(self) if n != int(client) + 1]
        )

    return leave


def latest(run):
    """The client that joined last."""
    firsts = first_rounds(run.rows)
    return max(firsts, key=lambda client: (firsts[client], client)), firsts


def test_thinning_keeps_the_checkpoint_before_every_first_round(finished):
    _, firsts = latest(finished)
    assert len(set(firsts.values())) > 1  # they join in different rounds
    kept = checkpoint.numbers(finished.folder / "checkpoints")
    assert kept == sorted({4} | {first - 1 for first in firsts.values() if first > 1})


def test_the_model_is_that_of_a_run_which_the_client_never_joined(finished, left, train, never_there):
    client, firsts = latest(finished)
    start = firsts[client] - 1
    assert start > 0
    never_there(client)
    expected = train(*WORDS, f"from={finished.folder}/checkpoints/{start}", folder="expected", small=False)
    assert same_bits(left.model, expected.model)
    assert not same_bits(left.model, finished.model)
    assert [without_times(row) for row in left.rows] == [without_times(row) for row in expected.rows]
    assert all(client not in row.get("clients", ()) for row in left.rows)


def test_the_statement_says_what_was_run_again_and_is_signed(finished, left, capsys):
    client, firsts = latest(finished)
    start = firsts[client] - 1
    path = left.folder / "forget.json"
    said = json.loads(path.read_text())
    assert (said["client"], said["first_round"], said["restarted_after_round"]) == (client, start + 1, start)
    assert said["rounds_again"] == 4 - start
    assert said["made_of_all_clients"] == ["mean and deviation of the pixels (dataset.mean, dataset.std)"]
    assert {"model.safetensors", "checkpoints/4"} <= set(said["files_that_still_hold_it"])
    public, text = (left.folder / "forget.json.pub").read_bytes(), path.read_text()
    assert signing.is_signed(path, public)
    try:
        path.write_text(text.replace('"client": "', '"client": "1'))
        assert not signing.is_signed(path, public)
        assert command(["verify", str(left.folder)]) == 1
        assert "damaged: forget.json" in capsys.readouterr().out
    finally:
        path.write_text(text)


def test_the_page_shows_how_to_check_the_signature(left, tmp_path, monkeypatch):
    for name in ("forget.json", "forget.json.sig", "forget.json.pub"):
        shutil.copy(left.folder / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    (code,) = python_blocks(ROOT / "docs/forget.md")
    exec(code, {})
    changed = (tmp_path / "forget.json").read_text().replace('"rounds_again": 1', '"rounds_again": 0')
    (tmp_path / "forget.json").write_text(changed)
    with pytest.raises(InvalidSignature):
        exec(code, {})


class Doors(InProcessGrid):
    """Notes who is asked, and lets nobody answer."""

    asked: tuple[int, ...] = ()

    def push_messages(self, messages):
        self.asked += tuple(message.metadata.dst_node_id for message in messages)
        return [str(number) for number, _ in enumerate(self.asked)]

    def pull_messages(self, message_ids):
        return []


def test_a_registered_site_that_left_is_not_even_asked():
    grid = Doors(None, 3, {})
    sites = {1: "north", 2: "south", 3: "west"}
    membership = Membership(
        Transport(grid), Invitation(timeout=0.05), sites=sites, excluded=frozenset({"south"})
    )
    assert membership.greet() == {} and grid.asked == (1, 3)


@pytest.mark.slow
def test_a_client_of_the_first_round_goes_back_to_the_beginning(finished, tmp_path, train, never_there):
    client = next(client for client, first in first_rounds(finished.rows).items() if first == 1)
    out = tmp_path / "without"
    assert command(["forget", str(finished.folder), "--client", client, "--out", str(out)]) == 0
    never_there(client)
    assert same_bits(Run(out).model, train(*WORDS, folder="expected", small=False).model)
    # And a second one leaves what is left.
    other = next(c for c in first_rounds(Run(out).rows) if c != client)
    again = tmp_path / "again"
    assert command(["forget", str(out), "--client", other, "--out", str(again), "--from-start"]) == 0
    never_there(other)
    assert same_bits(Run(again).model, train(*WORDS, folder="both", small=False).model)
    assert json.loads((again / "forget.json").read_text())["clients_left_out"] == sorted([client, other])


def test_an_interrupted_call_goes_on_where_it_was(finished, left, tmp_path, monkeypatch):
    client, _ = latest(finished)
    out = tmp_path / "broken"
    words = ["forget", str(finished.folder), "--client", client, "--out", str(out)]
    with killed_before_checkpoint(monkeypatch, 4):
        command(words)
    assert not (out / "forget.json").exists()
    assert command(words) == 0
    assert same_bits(Run(out).model, left.model)
    assert (out / "forget.json").exists()


def test_a_resumed_run_keeps_the_client_out(finished, left, tmp_path):
    client, _ = latest(finished)
    more = tmp_path / "more"
    shutil.copytree(left.folder, more)
    assert command(["resume", str(more), "num_rounds=6", "participation=1.0"]) == 0
    rows = Run(more).rows
    assert rows[-1]["round"] == 6 and len(rows[-1]["clients"]) == 4
    assert all(client not in row.get("clients", ()) for row in rows)


def test_a_dry_run_says_the_cost_and_runs_nothing(finished, tmp_path, capsys):
    client, _ = latest(finished)
    out = tmp_path / "none"
    words = ["forget", str(finished.folder), "--client", client, "--dry-run", "--out", str(out)]
    assert command(words) == 0
    assert "MB up" in capsys.readouterr().out and not out.exists()


def refusal(capsys, *words):
    capsys.readouterr()
    assert command(["forget", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0
    return said


def test_what_cannot_be_forgotten_is_refused_in_one_sentence(finished, tmp_path, capsys):
    run = str(finished.folder)
    assert "has no client 17: give one of 0, 1, 2, 3, 4" in refusal(capsys, run, "--client", "17")
    bare = tmp_path / "bare"
    shutil.copytree(finished.folder, bare)
    client, firsts = latest(finished)
    for number in checkpoint.numbers(bare / "checkpoints"):
        if number < firsts[client]:
            shutil.rmtree(bare / "checkpoints" / str(number))
    said = refusal(capsys, str(bare), "--client", client)
    assert f"keeps no checkpoint before round {firsts[client]}" in said and "--from-start" in said
    wrong = tmp_path / "key"
    wrong.write_text("no key")
    assert "is no private key in PEM" in refusal(capsys, run, "--client", "1", "--key", str(wrong))


@pytest.mark.parametrize(
    "words, expected",
    [
        (["secure_aggregation=on"], "as the difference of two sums"),
        (["privacy=dp_sgd", "privacy.epsilon=8", "privacy.seeded_noise=true"], "bounds the influence of one"),
    ],
)
def test_masked_and_private_runs_say_why_not(words, expected, tmp_path, capsys, train):
    folder = tmp_path / "run"
    run = train(*WORDS, "participation=1.0", "num_rounds=1", *words)
    assert run.folder == folder
    assert expected in refusal(capsys, str(folder), "--client", "1")


def test_a_run_leaves_out_whom_it_is_told_to(train, capsys):
    found = train("exclude_clients=[1]", "num_rounds=1")
    assert found.rows[-1]["clients"] == ["0", "2"]
    assert command([*SMALL, "exclude_clients=[7]", "output_dir=/tmp/none"]) == 2
    assert "exclude_clients=7 is no client: give numbers from 0 to 2" in capsys.readouterr().err


def test_an_elliptic_key_signs_too(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("{}")
    signing.sign_file(path, ec.generate_private_key(ec.SECP384R1()))
    assert signing.is_signed(path, (tmp_path / "file.json.pub").read_bytes())
