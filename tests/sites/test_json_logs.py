"""Lines of a site's log as JSON: about which site, run and round, and without what an error quotes."""

import io
import json
import logging

import pytest
from flwr.app import Context, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedfrozen_app.core.logs import JsonLine
from fedfrozen_app.exchange.hello_messages import hello_message
from fedfrozen_app.sites import request_handler
from fedfrozen_app.sites.request_handler import RequestHandler
from tests.monitoring.kits import make_kit

ROW = "Ada Lovelace, 1815-12-10, C50.9"


@pytest.fixture
def lines():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLine())
    logger = logging.getLogger("fedfrozen_app.sites")
    logger.addHandler(handler)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)


def handled(kit, text):
    """A hello with this proposal."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, 0, 0
    message = hello_message(1, {}, 60.0, text)
    context = Context(1, 1, {}, RecordDict(), {})
    return RequestHandler(kit).handle(message, context, "b" * 64)


def test_a_refusal_is_about_this_site(tmp_path, lines):
    kit = make_kit(tmp_path / "kit")
    handled(kit, '{"run": \x1b[31m')
    (line,) = lines()
    assert (line["site"], line["run"], line["level"]) == ("north", None, "warning")
    assert (
        line["message"].startswith("Refused: what was proposed cannot be read")
        and "\x1b" not in line["message"]
    )


def test_an_error_that_quotes_a_row(tmp_path, lines, monkeypatch):
    def quotes(site, incoming):
        from fedfrozen_app.core.logs import learn

        learn(run="study", round=4)
        raise ValueError(f"could not convert string to float: '{ROW}'")

    monkeypatch.setitem(request_handler.HANDLERS, MessageType.QUERY, quotes)
    handled(make_kit(tmp_path / "kit"), "{}")
    (line,) = lines()
    assert (line["site"], line["run"], line["round"], line["error"]) == ("north", "study", 4, ["ValueError"])
    assert "Lovelace" not in json.dumps(line) and any("quotes" in place for place in line["stack"])
