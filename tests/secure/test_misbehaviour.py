"""One client that breaks the protocol of masks: the others' round ends with the right sum, or it is given up
with a sentence. It never ends with a wrong sum."""

import json
from dataclasses import replace
from random import Random

import pytest

from fedfrozen_app.exchange.masking_messages import masking_reply, masking_text
from fedfrozen_app.secure import client, sum_up
from fedfrozen_app.secure.roster import to_text
from tests.secure.misbehaviour import ALL, Round
from tests.secure.runs import ON, PLAIN
from tests.secure.test_rounds import Lossy

# The server sees what cannot be unmasked, and whose shares that are.
DEALT = {("shares", "no envelope that opens"), ("shares", "envelopes for each other")}
DEALT |= {("shares", "false shares"), ("keys", "another commitment")}
# Nobody can know who sent something else than its masked vector.
SPOILS = DEALT | {("train", "another vector"), ("train", "without masks")}
MANY = 2_000
EVERY = [(step, name) for step, found in ALL.items() for name in found]


@pytest.mark.parametrize(("step", "name"), EVERY, ids=[f"{step}: {name}" for step, name in EVERY])
def test_one_client_does_not_stop_the_others(step, name):
    round_ = Round(6, "00", {step: ALL[step][name]}, Random(1))
    found = round_.run()
    assert round_.check() == ((step, name) not in SPOILS), found.problem
    assert set(found.spoilt_by) == ({"00"} if (step, name) in DEALT else set())


@pytest.mark.parametrize("step", ["keys", "confirm"])
def test_with_too_few_others_the_round_is_given_up(step):
    """Of three clients two are too few for a cohort of three; and nothing of theirs was unmasked."""
    round_ = Round(3, "01", {step: ALL[step]["a false signature"]}, Random(2))
    found = round_.run()
    assert round_.check() == (step == "confirm")  # two have signed, and its vector is in the sum
    if step == "keys":
        assert found.problem == "2 clients sent keys, and 3 are needed: no sum was unmasked"
        assert found.failures["01"] == "sent keys that are not to be believed: its signature is another's"


def played(count: int, seed: int) -> int:
    """Rounds of three to nine with a client that breaks the protocol in some steps; those with a sum."""
    rng, sums = Random(seed), 0
    for _ in range(count):
        clients = rng.randint(3, 9)
        steps = rng.sample(list(ALL), rng.randint(1, 3))
        breaks = {step: rng.choice(list(ALL[step].values())) for step in steps}
        round_ = Round(clients, f"{rng.randrange(clients):02}", breaks, rng)
        if rng.random() < 0.3:  # another one is lost
            round_.lost = rng.choice(list(ALL)), rng.choice(round_.names)
        round_.run()
        sums += round_.check()
    return sums


def test_random_misbehaviour():
    assert 5 < played(25, seed=7) < 25


@pytest.mark.slow
def test_much_random_misbehaviour():
    assert played(MANY, seed=8) > MANY / 3


def test_a_share_that_is_false_is_left_out_of_every_secret(monkeypatch):
    """As many false ones as may conspire, and an honest sum. Without the commitments it is none."""

    def run() -> bool:
        round_ = Round(7, "00", {"unmask": ALL["unmask"]["false shares"]}, Random(3))
        round_.also = {"01"}
        round_.run()
        return round_.check()

    assert run()
    monkeypatch.setattr(sum_up.Collector, "_is_own_mask", lambda *args: True)
    assert not run()


def test_a_client_that_opens_nothing_refuses():
    """More envelopes that do not open than may conspire: it was shown another roster than the others."""
    round_ = Round(7, "00", {})
    assert round_.cohort.advance()
    round_._ask("keys")
    round_.cohort.advance()
    round_._ask("shares")
    round_.cohort.advance()
    for number, declines in ((2, False), (3, True)):
        envelopes = json.loads(round_.cohort.step.requests["00"].envelopes)
        for name in round_.names[1 : 1 + number]:
            envelopes["envelopes"][name] = to_text(bytes(60))
        reply = round_.parties["00"].train(round_.request, json.dumps(envelopes))
        assert isinstance(reply, str) == declines
        round_.parties["00"].session = replace(round_.parties["00"].session, state=client.SHARES)
    assert "cannot be opened" in round_.parties["00"].declined


class Dealer(Lossy):
    """Client 1 seals nothing that opens."""

    def run_client(self, message):
        answer = super().run_client(message)
        if message.metadata.dst_node_id == 2 and answer.has_content() and "masking" in answer.content:
            found = json.loads(masking_text(answer))
            if "envelopes" in found:
                found["envelopes"] = {name: to_text(bytes(60)) for name in found["envelopes"]}
                return masking_reply(message, json.dumps(found))
        return answer


@pytest.mark.slow
def test_later_rounds_go_on_without_a_client_that_spoilt_one(train, monkeypatch, caplog):
    monkeypatch.setattr(Lossy, "gone", {})
    monkeypatch.setattr(Lossy, "seen", [])
    monkeypatch.setattr("fedfrozen_app.runtimes.inprocess.runtime.InProcessGrid", Dealer)
    run = train(ON, "num_clients=5", "num_rounds=3", *PLAIN)
    assert "cannot be taken off" in run.rows[1]["discarded"]
    assert [row["secure"].get("summed") for row in run.rows[1:]] == [None, 4, 4]
    assert "client 1 sealed what are no shares of its secrets" in caplog.text


def test_nothing_is_an_answer_too():
    """Every client is silent from some step on: the round ends."""
    for step in ALL:
        round_ = Round(3, "00", {step: ALL[step]["no answer"]})
        round_.also = set(round_.names)
        found = round_.run()
        assert found.sums is None and "needed" in found.problem, step
