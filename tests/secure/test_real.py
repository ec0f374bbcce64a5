"""Masked rounds through Flower's own processes, and over three real sites with TLS: `pytest -m slow`."""

import json

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.kit import Kit
from tests.conftest import SMALL, Run
from tests.secure.runs import ON, PLAIN, far, last_bits, stated, within_rounding
from tests.sites.federation import ROOT, SITES, federation
from tests.sites.twin import join, words
from tests.strategies.dual import WORDS as DUAL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# What a site's executor does that is killed at one step of each round, in the middle of its answer.
KILLED = """\
import json, os, signal, sys, threading, time

STEPS = json.loads(os.environ.get("KILLED_AT", "{}"))

def watch():
    while not hasattr(sys.modules.get("fedfrozen_app.sites.request_handler"), "RequestHandler"):
        time.sleep(0.02)
    from fedfrozen_app.exchange.masking_messages import MASKING, masking_text

    handler = sys.modules["fedfrozen_app.sites.request_handler"].RequestHandler
    handle = handler.handle

    def killed(self, message, context, bundle):
        kind, number = message.metadata.message_type, message.metadata.group_id
        step = "hello" if kind == "query" else "mask"
        if kind == MASKING:
            step = json.loads(masking_text(message))["step"]
        if step != "hello" and STEPS.get(number) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return handle(self, message, context, bundle)

    handler.handle = killed

if STEPS and "exec" in sys.orig_argv and "--unguarded" in sys.orig_argv:
    threading.Thread(target=watch, daemon=True).start()
"""


def test_flower_s_simulation_with_masks(tmp_path, train):
    rounds = ("num_rounds=2", "strategy.warmup_rounds=1", *PLAIN)
    folder = tmp_path / "flower"
    line = [*SMALL, *rounds, ON, "runtime=flower", f"output_dir={folder}", f"hydra.run.dir={folder}"]
    assert command(line) == 0
    one = train(*rounds, ON, folder="masked")
    masked, plain = Run(folder), train(*rounds, folder="plain")
    assert far(one, masked) <= last_bits(one)
    within_rounding(plain, masked)
    for row, twin in zip(masked.rows[1:], one.rows[1:], strict=True):
        assert row["bytes_up_by_role"] == twin["bytes_up_by_role"]
        assert row["secure"]["summed"] == 3


def test_flower_s_simulation_in_groups_of_equal_layers(tmp_path, train):
    """Each client's own choice, by chance: what it is, both runtimes have alike."""
    layers = (
        "strategy=safl",
        "strategy.select=random",
        "strategy.top_k=1",
        "dataset=digits",
        "model=vit_tiny",
    )
    rounds = (*layers, "num_clients=5", "num_rounds=2", *PLAIN, ON, "secure_aggregation.choices=groups")
    rounds = (*rounds, "secure_aggregation.min_cohort=2")
    folder = tmp_path / "flower"
    line = [*SMALL, *rounds, "runtime=flower", f"output_dir={folder}", f"hydra.run.dir={folder}"]
    assert command(line) == 0
    one, masked = train(*rounds, folder="masked"), Run(folder)
    assert far(one, masked) <= last_bits(one)
    for row, twin in zip(masked.rows[1:], one.rows[1:], strict=True):
        assert row["selection"] == twin["selection"] and len(row["selection"]) == 5
        assert row["secure"]["groups"] == twin["secure"]["groups"]
        assert row["bytes_up_by_role"] == twin["bytes_up_by_role"]
    assert any(len(row["secure"]["groups"]) > 1 for row in masked.rows[1:])


RUNS = {
    "fedfrozen": ("num_rounds=2", "strategy.warmup_rounds=1", *PLAIN),
    "scaffold": ("strategy=scaffold", "model=vit_tiny", "num_rounds=2", "client.lr=0.05"),
    "pfeddc": (
        *(word for word in DUAL if not word.startswith(("num_clients", "dataset", "partition", "personal"))),
        *("num_rounds=2", "client.optimizer=sgd", "client.lr=0.001", "dataset.align=0"),
    ),
}
ROLES = ["embedding", "query", "key", "value", "output", "mlp", "norm", "head", "prompt", "fusion"]


def test_three_methods_over_three_real_sites(tmp_path):
    """FedFrozen across the switch, SCAFFOLD and pFedDC: with masks what they are without."""
    found = {}
    with federation(tmp_path / "fed", SITES) as deployment:
        for site in SITES:
            deployment.change(site, "policy.yaml", strategies=list(RUNS), upload_roles=ROLES)
        join(deployment, SITES)
        for name, more in RUNS.items():
            for masks in ((), (ON,)):
                folder = tmp_path / f"{name}{len(masks)}"
                line = words(deployment, folder, *more, *masks, "runtime.min_nodes=3")
                if "strategy=pfeddc" in more:  # a model of its own
                    line = [word for word in line if not word.startswith("model.config.")]
                assert command(line) == 0, name
            plain, masked = Run(tmp_path / f"{name}0"), Run(tmp_path / f"{name}1")
            found[name] = far(plain, masked), stated(masked)
            print(name, "largest difference of a weight, and the rounding that is said:", found[name])
            within_rounding(plain, masked)
            for row in masked.rows[1:]:
                assert row["clients_ok"] == row["secure"]["summed"] == 3 and row["secure"]["clipped"] == 0
            assert abs(masked.rows[-1]["test_accuracy"] - plain.rows[-1]["test_accuracy"]) <= 0.01
        events = [e["event"] for e in read_audit(Kit.read(deployment.kits / "north").audit)]
        assert events.count("unmasked") == 2 * len(RUNS) and "refused" not in events


def test_a_site_that_is_killed_in_each_step(tmp_path):
    """West is killed at another step of every round; the round closes, and west is there in the next."""
    steps = {"1": "keys", "2": "shares", "3": "mask", "4": "confirm", "5": "unmask"}
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(KILLED)
    with federation(tmp_path / "fed", SITES) as deployment:
        for site in SITES:
            deployment.change(site, "policy.yaml", min_cohort=2, differencing="model")
        start = type(deployment).start

        def killed(self, party, script, *within):
            if (party, script) == ("west", "executor"):
                path = f"PYTHONPATH={tmp_path / 'python'}:{ROOT}"
                within = ("env", path, f"KILLED_AT={json.dumps(steps)}", *within)
            return start(self, party, script, *within)

        type(deployment).start = killed
        try:
            join(deployment, SITES)
        finally:
            type(deployment).start = start
        more = ("num_rounds=6", "strategy.warmup_rounds=3", "runtime.min_nodes=3", *PLAIN)
        secure = (ON, "secure_aggregation.min_cohort=2", "secure_aggregation.step_timeout=100")
        free = "aggregation.cohorts=free"  # a round closes without a site that is gone
        assert command(words(deployment, tmp_path / "run", *more, *secure, free)) == 0
        log = deployment.log("west-executor")
    rows = Run(tmp_path / "run").rows[1:]
    assert [row["secure"]["summed"] for row in rows] == [2, 2, 2, 3, 3, 3]
    assert [row["clients_ok"] for row in rows] == [2, 2, 2, 3, 3, 3]
    assert not any("discarded" in row for row in rows)
    assert log.count("starting it again") == 5, log[-3000:]
