"""A site leaves a federation of Flower's own processes, and the run forgets it from the server's side."""

import json
import re
import subprocess

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core import signing
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.kit import Kit
from tests.conftest import Run, same_bits
from tests.sites.federation import SITES, federation
from tests.sites.twin import join, largest_difference, the_same_in_process, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ROUNDS = ("num_rounds=2", "strategy.warmup_rounds=1", "checkpoint.keep=5", "baseline=false")


def test_a_site_of_a_deployed_federation_leaves_and_its_part_is_forgotten(tmp_path, capsys):
    run, without, key = tmp_path / "run", tmp_path / "without", tmp_path / "key.pem"
    openssl = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(key)]
    subprocess.run(openssl, check=True, capture_output=True)
    with federation(tmp_path / "fed", SITES) as deployment:
        join(deployment, SITES)
        assert command(words(deployment, run, *ROUNDS, "runtime.min_nodes=3")) == 0
        known = json.loads((run / "summary.json").read_text())["config"]["run_id"]
        north = Kit.read(deployment.kits / "north")
        run_id = known or read_audit(north.audit)[0]["run"]
        left = ["site", "leave", run_id, str(north.folder), "--reason", "consent withdrawn"]
        assert command(left) == 0
        (request,) = north.folder.glob("leave-*.json")
        words_of = ["forget", str(run), "--request", str(request), "--key", str(key), "--out", str(without)]
        capsys.readouterr()
        assert command(words_of) == 0
        shown = capsys.readouterr().out
        assert "north asked for it on" in shown and "(consent withdrawn)" in shown
        # The chain of the site's own decisions holds that it left.
        assert command(["site", "audit", str(north.folder)]) == 0
        assert re.search(r"  left +\{", capsys.readouterr().out)
        logs = {site: read_audit(Kit.read(deployment.kits / site).audit) for site in SITES}
    before, after = Run(run), Run(without)
    assert [row.get("clients") for row in before.rows[1:]] == [[*SITES]] * 2
    assert [row.get("clients") for row in after.rows[1:]] == [["south", "west"]] * 2
    assert not same_bits(before.model, after.model)
    # It was asked for nothing: its last entry is of the first run.
    assert [entry["event"] for entry in logs["north"]] == ["hello", "sent", "sent"]
    assert [entry["event"] for entry in logs["south"]].count("sent") == 4
    # The statement, whose signature holds, with the digest of the request.
    statement = without / "forget.json"
    said = json.loads(statement.read_text())
    assert (said["client"], said["request"]["reason"]) == ("north", "consent withdrawn")
    assert said["made_of_all_clients"] == [] and said["rounds_again"] == 2
    assert signing.is_signed(statement, (without / "forget.json.pub").read_bytes())
    assert command(["verify", str(without)]) == 0
    # And the model is that of a federation in which it never was: the others' kits in one process.
    (tmp_path / "twin").mkdir()
    alone = (*ROUNDS, "++runtime.min_nodes=2")
    twin = the_same_in_process(deployment, ("south", "west"), tmp_path / "twin", *alone)
    assert largest_difference(after, twin) <= 1e-6
