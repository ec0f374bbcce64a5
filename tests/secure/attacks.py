"""A server that attacks the masks of its sites."""

import json
from contextlib import nullcontext

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.exchange.masking_messages import MASKING, envelopes_of, masking_message, masking_text
from fedfrozen_app.exchange.messages import train_request_text
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.secure.certified import Shown
from fedfrozen_app.sites.audit_log import read_audit
from tests.secure.runs import ON, PLAIN
from tests.sites.inprocess import SiteGrid

ROUND = (ON, "num_rounds=1", "strategy.warmup_rounds=1", *PLAIN)


def log(sites, name="north"):
    return read_audit(sites.kit(name).audit)


def content(sites):
    """With two sites in a sum: of three, one may go."""
    for name in sites.names:
        sites.change(name, "policy.yaml", min_cohort=2)


class Hostile(SiteGrid):
    """Changes what is on its way to the sites; `tampers` gets the step, the site and the text."""

    tampers = staticmethod(lambda grid, step, site, text: text)
    taken: dict[tuple[str, str], str] = {}  # noqa: RUF012

    def run_client(self, message: Message) -> Message:
        site = self.executors[message.metadata.dst_node_id - 1].kit.name
        content = message.content
        if message.metadata.message_type == MASKING:
            text = masking_text(message)
            step = json.loads(text)["step"]
            changed = self.tampers(self, step, site, text)
            content["masking"] = ConfigRecord({"json": changed})
        elif "order" in content:
            text = self.tampers(self, "order", site, train_request_text(message))
            envelopes = self.tampers(self, "envelopes", site, envelopes_of(message))
            message = self._with(
                message,
                RecordDict(
                    {
                        **dict(content.items()),
                        "order": ConfigRecord({"json": text}),
                        "envelopes": ConfigRecord({"json": envelopes}),
                    }
                ),
            )
        answer = super().run_client(message)
        if answer.has_content() and "masking" in answer.content:
            self.taken[step, site] = masking_text(answer)
        return answer

    def _with(self, message: Message, content: RecordDict) -> Message:
        message.__dict__["_content"] = content
        return message

    def again(self, site: str, text: str, ticket: dict[str, str]) -> Message:
        """A question of the server's own, beside the round."""
        node = [e.kit.name for e in self.executors].index(site) + 1
        message = masking_message(node, 1, text, ttl=60, ticket=ticket)
        message.metadata.__dict__["_message_id"] = f"again-{site}"
        return SiteGrid.run_client(self, message)


def attack(sites, tampers, *words, fails=True):
    """Run a round through a server that tampers; the reasons that the sites wrote down."""
    grids = []

    def make_grid(executors, bundle):
        grid = Hostile(executors, bundle)
        grid.tampers, grid.taken = tampers, {}
        grids.append(grid)
        return grid

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shown, "problem", lambda *args: None)  # what sites sign is not checked on its side
        with pytest.raises((RunFailed, UserError)) if fails else nullcontext():
            sites.train(*(words or ROUND), make_grid=make_grid)
    reasons = {
        name: [e["reason"] for e in log(sites, name) if e["event"] in ("refused", "failed")]
        for name in sites.names
    }
    events = [entry["event"] for name in sites.names for entry in log(sites, name)]
    return reasons, events, grids[0]


def with_roster(text, change):
    question = json.loads(text)
    if question["step"] == "shares":
        question["roster"] = sorted(change(question["roster"]))
    return canonical(question)


def ticket(sites) -> dict[str, str]:
    entry = next(e for e in log(sites) if e["event"] == "roster")
    return {"run": entry["run"], "proposal": entry["proposal"]}
