"""A site's folder as `fedfrozen site desk` reads it, without keys and processes, and a client of the page."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from PIL import Image
from starlette.testclient import TestClient

from fedfrozen_app.desk.app import Desk, make_app
from fedfrozen_app.desk.catalogue import read_texts
from fedfrozen_app.desk.counting import Count, Counts
from fedfrozen_app.desk.session import COOKIE, Session
from fedfrozen_app.exchange.proposal import Proposal, read_proposal
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.sites.approval import Approvals
from fedfrozen_app.sites.audit_log import AuditLog
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.survey import Survey
from tests.sites.federation import VIEWS
from tests.sites.test_hostile import ROLES, proposed

HOST = "127.0.0.1:8470"
BUNDLE = "b" * 64
POLICY = {
    "strategies": ["fedfrozen"],
    "upload_roles": list(ROLES),
    "min_examples": 10,
    "min_people": 10,
    "rounds_per_day": 50,
    "max_epsilon": 8.0,
    "max_delta": 1e-4,
    "privacy_required": False,
    "bundles": [BUNDLE],
    "approval": "ask",
}
PRIVATE = ("privacy=dp_sgd", "privacy.epsilon=3", "privacy.delta=1e-6", "client=sgd", "client.momentum=0")
SURVEY = Survey(120, 118, (), 5000, 20000, {"head": 4000, "query": 8000}, 12000)


def make_kit(folder: Path, **policy: object) -> Kit:
    (folder / "data").mkdir(parents=True)
    site = {"name": "north", "superlink": "fl.example.org:8443", "folder": "var", "views": VIEWS}
    (folder / "site.yaml").write_text(yaml.safe_dump(site))
    (folder / "policy.yaml").write_text(yaml.safe_dump(POLICY | policy))
    return Kit.read(folder)


def write_pictures(kit: Kit, each: int = 4) -> None:
    for digit in range(10):
        for number in range(each):
            path = kit.folder / "data" / str(digit) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), 20 * digit + number, np.uint8)).save(path)


def put_before(kit: Kit, *overrides: str, run: str = "test", **changes: object) -> Proposal:
    """A run that the site has put before its people, as the executor does."""
    plain = proposed(*overrides)
    plain["run"]["id"] = run
    for key, value in changes.items():
        part, _, name = key.partition("__")
        plain[part][name] = value
    proposal = read_proposal(canonical(plain))
    Approvals(kit.approvals).ask(proposal)
    about = {"run": run, "proposal": proposal.hash, "bundle": BUNDLE}
    AuditLog(kit.audit).write("pending", message="query", **about, epsilon_asked=proposal.epsilon)
    return proposal


class Counted(Counts):
    """Without a process of its own for each proposal."""

    def of(self, proposal: str) -> Count:
        return Count(survey=replace(SURVEY))


@dataclass
class Browser:
    """A client with the session's cookie, which sends what a browser sends."""

    client: TestClient
    session: Session

    def get(self, path: str = "/", **headers: str):
        return self.client.get(self.session.base + path, headers=headers, follow_redirects=False)

    def post(self, path: str, data: dict[str, str] | None = None, **headers: str):
        own = {"Origin": f"http://{HOST}", "Sec-Fetch-Site": "same-origin"} | headers
        data = {"csrf": self.session.csrf} | (data or {})
        return self.client.post(self.session.base + path, data=data, headers=own, follow_redirects=False)

    def decide(self, proposal: str, decision: str, reason: str = ""):
        return self.post(f"/proposal/{proposal}/{decision}", {"reason": reason})


def open_desk(kit: Kit, *, enter: bool = True, counts: Counts | None = None) -> Browser:
    session = Session()
    desk = Desk(kit.folder, read_texts(), session, counts or Counted(kit.folder), lambda: None)
    client = TestClient(make_app(desk, HOST), base_url=f"http://{HOST}")
    if enter:
        answer = client.get(f"{session.base}/enter?token={session.token}")
        assert answer.status_code == 200 and COOKIE in client.cookies
    return Browser(client, session)


def words_of(html: str) -> str:
    """What a reader sees: without tags, with single spaces."""
    from html import unescape

    html = re.sub(r"</?(bdi|b|small|a|code)\b[^>]*>", "", html)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())
