"""What a client says is data: whatever terminal, log or page quotes it gets one line without control
characters, and not a long one."""

import json
import logging
from dataclasses import replace

import pytest
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict

from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.core.formatting import printable, quoted
from fedfrozen_app.exchange.masking_messages import MASKING, masking_reply
from fedfrozen_app.exchange.messages import read_reply, train_reply
from fedfrozen_app.sites.approval_verbs import print_lines
from tests.conftest import slowly
from tests.sites.inprocess import SiteGrid
from tests.sites.test_names import register

ROUND = ("num_rounds=1", "strategy.warmup_rounds=1")
# It clears the terminal, sets its title, and begins a line of its own.
EVIL = "declines\x1b[2J\x1b]0;owned\x07\nRound 1: all is well\u202e\u2028" + "x" * 2000


def answering(change, kind=MessageType.TRAIN, node=3):
    class Grid(SiteGrid):
        def run_client(self, message):
            answer = super().run_client(message)
            if (message.metadata.message_type, message.metadata.dst_node_id) == (kind, node):
                return change(message, answer)
            return answer

    return Grid


def declined(message, answer):
    return train_reply(message, replace(read_reply(answer), declined=EVIL), local=False)


def failed(message, answer):
    return Message(Error(1, EVIL), reply_to=message)


def strange_array(message, answer):
    reply = read_reply(answer)
    first = next(iter(reply.arrays.values()))
    return train_reply(message, replace(reply, arrays={**reply.arrays, EVIL: first.clone()}), local=False)


def strange_metric(message, answer):
    reply = read_reply(answer)
    return train_reply(message, replace(reply, metrics={EVIL: 1.0}), local=False)


def strange_reply(message, answer):
    return Message(RecordDict({"reply": ConfigRecord({"json": json.dumps({EVIL: 1})})}), reply_to=message)


def check_lines(texts):
    assert texts
    for text in texts:
        assert text.isprintable() and len(text) < 1000, text[:200]


@pytest.mark.parametrize("change", [declined, strange_array, *slowly(failed, strange_metric, strange_reply)])
def test_no_reply_writes_to_the_operator_s_terminal(sites, caplog, change):
    """Before, a `declined` text went to the log, to metrics.jsonl and to the sentence that ends a run."""
    run = sites.train(*ROUND, make_grid=answering(change))
    assert run.rows[1]["clients_ok"] == 2 and run.rows[1]["failures"]
    check_lines(run.rows[1]["failures"])
    check_lines([record.getMessage() for record in caplog.records if record.levelno >= logging.INFO])


def test_nor_does_the_sentence_that_ends_a_run(sites):
    class Grid(answering(declined, node=1)):
        def run_client(self, message):
            answer = super().run_client(message)
            return declined(message, answer) if message.metadata.message_type == "train" else answer

    with pytest.raises(RunFailed) as error:
        sites.train(*ROUND, make_grid=Grid)
    check_lines([str(error.value)])


def test_nor_a_step_of_a_masked_round(sites, caplog):
    def change(message, answer):
        return masking_reply(message, json.dumps({"declined": EVIL}))

    with pytest.raises((RunFailed, UserError)) as error:
        sites.train(*ROUND, "secure_aggregation=on", make_grid=answering(change, MASKING))
    check_lines([str(error.value), *(record.getMessage() for record in caplog.records)])


def test_nor_a_hello(sites, caplog):
    register(sites)
    grid = answering(failed, MessageType.QUERY)
    sites.train(*ROUND, "runtime.min_nodes=2", make_grid=grid)
    check_lines([record.getMessage() for record in caplog.records if "hello" in record.getMessage()])


def test_a_proposal_is_shown_line_by_line(capsys):
    print_lines(["view      a\nprivacy   epsilon 0.1 \x1b[8m", "budget    left"])
    shown = capsys.readouterr().out
    assert shown == "view      a\\nprivacy   epsilon 0.1 \\x1b[8m\nbudget    left\n"


def test_a_long_text_is_cut_with_a_word():
    assert quoted("a" * 500) == "a" * 400 + " (and 100 more characters)"
    assert quoted("é\t") == "é\\t" == printable("é\t")
