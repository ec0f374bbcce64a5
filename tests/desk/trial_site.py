"""A site whose steward has work: a real kit, a table, a pilot that has trained, and two requests that wait.

Everything arrives as in a federation: the site's own request handler reads, checks and records it.
"""

import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

from fedfrozen_app.config import compose_run
from fedfrozen_app.data.federated import load_corpus
from fedfrozen_app.exchange.proposal import Proposal, propose
from fedfrozen_app.local.worker import make_data_spec
from fedfrozen_app.sites import decide
from fedfrozen_app.sites.approval import Approvals
from fedfrozen_app.sites.kit import Kit
from tests.sites.inprocess import BUNDLE, SiteGrid, Sites
from tests.sites.test_hostile import ROLES

SITE = "north"
AGREED = ["age", "sex", "dose"]
FORBIDDEN = "postcode"
TABLE = {
    **{"kind": "table", "path": "patients.csv", "columns": [*AGREED, FORBIDDEN], "label_column": "ill"},
    **{"classes": ["0", "1"], "unit": "patient", "unit_column": "patient", "client_validation": 0.0},
}
POLICY = {
    **{"strategies": ["fedavg"], "upload_roles": list(ROLES), "bundles": [BUNDLE], "approval": "ask"},
    **{"min_examples": 10, "min_people": 10, "max_epsilon": 8.0, "max_delta": 1e-4, "metrics": False},
    **{"privacy_required": False, "rounds_per_day": 50},
}
# What the steward asks IT for, once the bad request has arrived.
STRICTER = {"privacy_required": True, "forbidden_columns": [FORBIDDEN]}
RUN = (
    *("strategy=fedavg", "model=linear", "client=sgd", "client.momentum=0", "client.batch_size=8"),
    *("dataset.label_column=ill", "runtime.min_nodes=1"),
)
NOISE = ("privacy=dp_sgd", "privacy.unit=patient", "privacy.unit_column=patient", "privacy.delta=1e-6")
PILOT = (*NOISE, "privacy.epsilon=1", "num_rounds=2", "client.local_epochs=1")
GOOD = (*NOISE, "privacy.epsilon=2", "num_rounds=3", "client.local_epochs=1")
BAD = ("num_rounds=3", "client.local_epochs=2")


def patients(number: int, rows: int = 120) -> pandas.DataFrame:
    rng = np.random.default_rng(number)
    age, sex = rng.normal(60, 10, rows).round(), rng.choice(["f", "m"], rows)
    ill = (age + rng.normal(0, 4, rows) > 60).astype(int)
    postcode = rng.choice(["10115", "20095", "50667", "80331"], rows)
    names = {"patient": [f"p{row}" for row in range(rows)], "age": age, "sex": sex}
    return pandas.DataFrame(names | {"dose": rng.normal(size=rows), "postcode": postcode, "ill": ill})


class TrialSite(Sites):
    """One site, and a server with rows of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, names=(SITE,), settings=(), rows=9)

    @property
    def own(self) -> Kit:
        return self.kit(SITE)

    def prepare(self) -> None:
        super().prepare()
        patients(1).to_csv(self.folder / "kits" / SITE / "patients.csv", index=False)
        patients(2).to_csv(self.folder / "data" / "server.csv", index=False)
        self.change(SITE, "site.yaml", views={"heart": TABLE})
        self.change(SITE, "policy.yaml", **POLICY)

    def words(self, *overrides: str) -> list[str]:
        path = f"dataset.path={self.folder}/data/server.csv"
        columns = "dataset.columns=[" + ",".join(AGREED) + "]"
        wait = [f"runtime={self.runtime}", "runtime.node_timeout=60"]
        return ["dataset=table", path, columns, *RUN, *wait, *overrides]

    def proposal(self, run: str, *overrides: str, columns: Sequence[str] = AGREED) -> Proposal:
        named = ("dataset.columns=[" + ",".join(columns) + "]", f"run_id={run}")
        config = compose_run(self.words(*named, *overrides)).config
        return propose(config, make_data_spec(load_corpus(config), config), run, ["head"])

    def ask(self, proposal: Proposal) -> str:
        """The site's state after a server's first message: "" (accepted), "waiting" or "refused"."""
        self.restart()
        SiteGrid(self.executors)
        content = RecordDict({"hello": ConfigRecord({"card": "{}", "proposal": proposal.text})})
        message = Message(content, dst_node_id=1, message_type=MessageType.QUERY)
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        answer = self.executors[SITE].handle(message, context, BUNDLE)
        return json.loads(str(answer.content["hello"]["json"]))["state"]

    def train_approved(self, run: str, *overrides: str) -> None:
        """A whole run, which the steward approves as soon as it is asked for."""
        thread = threading.Thread(target=approve_what_waits, args=(self.own,))
        thread.start()
        self.train(f"run_id={run}", *overrides, folder=run)
        thread.join()


def approve_what_waits(kit: Kit, patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while not (waiting := Approvals(kit.approvals).waiting()):
        assert time.monotonic() < deadline, "nothing was asked for"
        time.sleep(0.1)
    decide.approve(kit, waiting[0])


def prepare(folder: Path) -> TrialSite:
    """The pilot has trained, the bad and the good request wait, and IT has made the rules stricter."""
    site = TrialSite(folder)
    site.prepare()
    site.train_approved("heart-pilot", *PILOT)
    assert site.ask(site.proposal("heart-3", *BAD, columns=[*AGREED, FORBIDDEN])) == "waiting"
    assert site.ask(site.proposal("heart-2", *GOOD)) == "waiting"
    site.change(SITE, "policy.yaml", **STRICTER)
    os.chmod(site.own.policy, 0o600)  # noqa: PTH101
    return site
