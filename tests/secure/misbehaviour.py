"""A round of the server's own code over clients of which one breaks the protocol at some step.

The server is `server.masked.Cohort`, the clients are `secagg_messages.answer_step`; only transport and
training are left out. Every misbehaviour is a change of what the one client answers, or of what it holds.
"""

import json
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import torch

from fedfrozen_app.core.digests import digest
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.exchange.train_request import Masking, TrainRequest
from fedfrozen_app.secure import client, secagg_messages, shares
from fedfrozen_app.secure.roster import (
    Entry,
    ProtocolError,
    Roster,
    holders,
    signed_text,
    to_bytes,
    to_text,
)
from fedfrozen_app.secure.round_keys import OnSight, Pair, Simulated, new_seed
from fedfrozen_app.secure.shares import SHARE
from fedfrozen_app.secure.work import MASKED, encoded, masked, problem_of_masked
from fedfrozen_app.server.masked import Cohort

TRUST = OnSight()
SETTINGS = {
    **{"threshold": 2 / 3, "neighbours": None, "min_cohort": 3, "choices": "union", "noise": "client"},
    **{"bits": 32, "clip": 1.0, "state_clip": 100.0, "max_examples": 100, "max_norm": None},
}
MODEL = {"w": torch.zeros(7)}
EXAMPLES = 50
LATE = "did not answer within 1 s"
STEPS = ("keys", "shares", "train", "confirm", "unmask")


def request_of(round_: int = 1, **settings: Any) -> TrainRequest:
    base = {name: digest(value) for name, value in MODEL.items()}
    masking = Masking(secrets.token_hex(16), SETTINGS | settings)
    return TrainRequest(round_, Plan(("w",), ("w",), ()), base, masking=masking)


@dataclass
class Party:
    """One client: it answers as the protocol says."""

    name: str
    update: torch.Tensor
    identity: Simulated = field(default_factory=lambda: Simulated(new_seed()))
    session: client.Session | None = None
    declined: str = ""

    def answer(self, step: str, text: str, fewest: int) -> str | ValueError:
        try:
            question = secagg_messages.read_question(text)
            self.session, found = secagg_messages.answer_step(
                *(question, self.name, self.session, self.identity, TRUST), fewest
            )
        except ProtocolError as no:
            self.declined = str(no)
            return json.dumps({"declined": f"declines: {no}"})
        return found

    def share_anyway(self, text: str) -> str:
        """Although the roster has other keys of its than its own."""
        roster = Roster(self.session.terms, tuple(map(Entry.read, json.loads(text)["roster"])))
        drawn, pair = roster.draw(self.name), Pair(self.session.cipher)
        everyone, needed = holders(self.name, drawn), roster.shares_needed
        halves = [shares.split(one, everyone, needed) for one in (self.session.own, self.session.mask)]
        self.session = replace(self.session, state=client.SHARES, roster_text=roster.text, drawn=drawn)
        envelopes = {
            name: client.seal(
                pair.agree(roster.by_name[name].cipher, roster.digest, "envelope"),
                halves[0][name] + halves[1][name],
                client.envelope_about(roster, self.name, name),
            )
            for name in drawn
        }
        return canonical({"envelopes": {name: to_text(one) for name, one in envelopes.items()}})

    def train(self, request: TrainRequest, envelopes: str) -> Reply | str:
        try:
            session = secagg_messages.opened(envelopes, self.session, request)
        except ProtocolError as no:
            self.declined = str(no)
            return f"declines: {no}"
        reply = Reply(request.digest, EXAMPLES, {"w": MODEL["w"] + self.update})
        vector = encoded(session.roster, request, reply, MODEL, np.random.default_rng(0))
        self.session, found = masked(session, request, vector, {})
        return found


@dataclass
class Round:
    """`breaks[step]` makes the answer of the client `bad` from its honest one."""

    count: int
    bad: str = ""
    breaks: Mapping[str, Callable[["Round", Any], Any]] = field(default_factory=dict)
    rng: Random = field(default_factory=lambda: Random(0))
    settings: Mapping[str, Any] = field(default_factory=dict)
    also: Collection[str] = ()  # that do the same as `bad`
    lost: tuple[str, str] = ("", "")  # a step at which another client does not answer

    def __post_init__(self) -> None:
        values = np.random.default_rng(self.rng.randrange(2**32))
        self.names = [f"{number:02}" for number in range(self.count)]
        self.parties = {
            name: Party(name, torch.from_numpy(values.uniform(-0.5, 0.5, 7).astype(np.float32)))
            for name in self.names
        }
        self.request = request_of(**self.settings)
        members = [(name, number) for number, name in enumerate(self.names)]
        self.cohort = Cohort(self.request, members, MODEL)
        self.answers: dict[str, dict[str, str]] = {}

    @property
    def own(self) -> Party:
        return self.parties[self.bad]

    def run(self) -> Cohort:
        going = self.cohort.advance()
        for step in STEPS:
            if not going:
                break
            self._train() if step == "train" else self._ask(step)
            going = self.cohort.advance()
        assert not going, "the round has no end"
        return self.cohort

    def _ask(self, step: str) -> None:
        answers = {
            name: self.parties[name].answer(step, text, SETTINGS["min_cohort"])
            for name, text in self.cohort.step.questions.items()
        }
        if step == "shares" and "keys" in self.breaks and self.bad in answers:
            answers[self.bad] = self.own.share_anyway(self.cohort.step.questions[self.bad])
        self.answers[step] = dict(answers)
        for name in {self.bad, *self.also} & answers.keys():
            if step in self.breaks and "declined" not in answers[name]:
                answers[name] = self.breaks[step](self, answers[name])
        if step == self.lost[0] and self.lost[1] in answers:
            answers[self.lost[1]] = ValueError(LATE)
        self.cohort.step.answers = list(answers.items())

    def _train(self) -> None:
        for name, asked in self.cohort.step.requests.items():
            reply = self.parties[name].train(asked.request, asked.envelopes)
            if name in {self.bad, *self.also} and "train" in self.breaks:
                reply = self.breaks["train"](self, reply)
            if self.lost == ("train", name):
                reply = LATE
            if isinstance(reply, Reply):
                reply = problem_of_masked(reply, asked.request, asked.layout) or reply
            self.cohort.take_reply(name, reply)

    def check(self) -> bool:
        """Whether there is a sum, which then is that of the clients in it; otherwise a sentence says why."""
        found = self.cohort
        if found.sums is None:
            assert found.problem and len(found.problem.split()) > 3
            return False
        summed = [name for name in self.names if name not in found.failures]
        assert found.sums.replies == len(summed)
        expected = sum(self.parties[name].update.double() * EXAMPLES for name in summed)
        far = (found.sums.arrays["w"].double() - expected).abs().max()
        assert far <= found.slack["w"], f"a wrong sum: {far}"
        return True


# What one client may do ---------------------------------------------------------------------------------


def nothing(round_: Round, answer: Any) -> Any:
    return ValueError(LATE)


def no_text(round_: Round, answer: Any) -> Any:
    texts = ["", "{", "[]", "null", '{"entry":[]}', '{"entry":7}', '{"envelopes":7}', '{"own":[],"keys":{}}']
    texts += ['{"signature":7}', '{"own":{"a":"%"},"keys":{}}', '{"envelopes":{"00":"?"}}', "[" * 50, "\x00"]
    return round_.rng.choice(texts)


def entry_with(change: Callable[[Round, list[str]], list[str]], *, signed: bool = False):
    """Another entry; `signed`: by the client, as it then is."""

    def changed(round_: Round, answer: str) -> str:
        entry = change(round_, json.loads(answer)["entry"])
        if signed:
            terms = round_.parties[round_.bad].session.terms
            parts = [to_bytes(part) for part in entry[1:-2]]
            entry[-1] = to_text(round_.own.identity.sign(signed_text(terms, entry[0], *parts)))
        return canonical({"entry": entry})

    return changed


def at(number: int, value: Callable[[Round], str]) -> Callable[[Round, list[str]], list[str]]:
    def change(round_: Round, entry: list[str]) -> list[str]:
        return [*entry[:number], value(round_), *entry[number + 1 :]]

    return change


def some_bytes(count: int) -> Callable[[Round], str]:
    return lambda round_: to_text(round_.rng.randbytes(count))


def other_entry(round_: Round, entry: list[str]) -> list[str]:
    """The keys of another client, in its own name."""
    other = json.loads(round_.answers["keys"][round_.rng.choice(round_.names[1:])])["entry"]
    return [entry[0], *other[1:-2], *entry[-2:]]


LOW_ORDER = to_text(bytes(32))  # agrees on zeros with every key
KEYS = {
    "another's name": entry_with(at(0, lambda round_: "someone")),
    "a key too short": entry_with(at(1, some_bytes(31)), signed=True),
    "a key that is none": entry_with(at(2, lambda round_: LOW_ORDER), signed=True),
    "an envelope key that is none": entry_with(at(1, lambda round_: LOW_ORDER), signed=True),
    "one key twice": entry_with(lambda round_, e: [e[0], e[1], e[1], *e[3:]], signed=True),
    "another's keys": entry_with(other_entry, signed=True),
    "a false signature": entry_with(lambda round_, e: [*e[:-1], some_bytes(64)(round_)]),
    "no signature": entry_with(lambda round_, e: [*e[:-1], ""]),
    "another key than it signed": entry_with(lambda round_, e: [e[0], some_bytes(32)(round_), *e[2:]]),
    "another commitment": entry_with(at(3, some_bytes(32)), signed=True),
    "a strange credential": entry_with(lambda round_, e: [*e[:-2], some_bytes(32)(round_), e[-1]]),
    "a long credential": entry_with(lambda round_, e: [*e[:-2], some_bytes(9_000)(round_), e[-1]]),
    "no answer": nothing,
    "no text": no_text,
}


def envelopes_with(change: Callable[[Round, dict[str, bytes]], dict[str, bytes]]):
    def changed(round_: Round, answer: str) -> str:
        found = {name: to_bytes(one) for name, one in json.loads(answer)["envelopes"].items()}
        changed = change(round_, found)
        return canonical({"envelopes": {name: to_text(one) for name, one in changed.items()}})

    return changed


def some_garbage(most: int | None) -> Callable[[Round, dict[str, bytes]], dict[str, bytes]]:
    def change(round_: Round, found: dict[str, bytes]) -> dict[str, bytes]:
        names = round_.rng.sample(sorted(found), min(len(found), most or len(found)))
        return found | {name: round_.rng.randbytes(len(found[name])) for name in names}

    return change


def false_shares(round_: Round, found: dict[str, bytes]) -> dict[str, bytes]:
    """Sealed as they should be, and of no secret of its."""
    party = round_.own
    roster, pair = party.session.roster, Pair(party.session.cipher)
    return {
        name: client.seal(
            pair.agree(roster.by_name[name].cipher, roster.digest, "envelope"),
            round_.rng.randbytes(2 * SHARE),
            client.envelope_about(roster, round_.bad, name),
        )
        for name in found
    }


def swapped(round_: Round, found: dict[str, bytes]) -> dict[str, bytes]:
    names = sorted(found)
    return dict(zip(names, [found[name] for name in reversed(names)], strict=True))


SHARES = {
    "one envelope less": envelopes_with(lambda round_, e: dict(list(e.items())[1:])),
    "no envelope": envelopes_with(lambda round_, e: {}),
    "one for a stranger": envelopes_with(lambda round_, e: dict(list(e.items())[1:]) | {"x": b"1" * 60}),
    "one for itself": envelopes_with(lambda round_, e: {**e, round_.bad: b"1" * 60}),
    "short envelopes": envelopes_with(lambda round_, e: {name: one[:20] for name, one in e.items()}),
    "one envelope that does not open": envelopes_with(some_garbage(1)),
    "no envelope that opens": envelopes_with(some_garbage(None)),
    "envelopes for each other": envelopes_with(swapped),
    "false shares": envelopes_with(false_shares),
    "no answer": nothing,
    "no text": no_text,
}


def garbage(round_: Round, reply: Reply | str) -> Reply | str:
    if isinstance(reply, str):
        return reply
    size = reply.arrays[MASKED].numel()
    array = torch.tensor(list(round_.rng.randbytes(size)), dtype=torch.uint8)
    return replace(reply, arrays={MASKED: array})


def another_size(round_: Round, reply: Reply | str) -> Reply | str:
    return reply if isinstance(reply, str) else replace(reply, arrays={MASKED: reply.arrays[MASKED][:-4]})


def without_masks(round_: Round, reply: Reply | str) -> Reply | str:
    if isinstance(reply, str):
        return reply
    plain = Reply(round_.request.digest, EXAMPLES, {"w": MODEL["w"] + round_.own.update})
    roster = round_.own.session.roster
    vector = encoded(roster, round_.request, plain, MODEL, np.random.default_rng(0))
    return replace(reply, arrays={MASKED: torch.from_numpy(vector.packed(32))})


TRAIN = {
    "another vector": garbage,
    "another size": another_size,
    "without masks": without_masks,
    "no answer": lambda round_, reply: LATE,
}


def signature_with(make: Callable[[Round], bytes]):
    return lambda round_, answer: canonical({"signature": to_text(make(round_))})


def of_another_list(round_: Round) -> bytes:
    roster = round_.own.session.roster
    return round_.own.identity.sign(client.survivors_text(roster, roster.names[:2]))


CONFIRM = {
    "a false signature": signature_with(lambda round_: round_.rng.randbytes(64)),
    "no signature": signature_with(lambda round_: b""),
    "the signature of another list": signature_with(of_another_list),
    "no answer": nothing,
    "no text": no_text,
}


def unmasking_with(change: Callable[[Round, dict[str, bytes]], dict[str, bytes]]):
    def changed(round_: Round, answer: str) -> str:
        found = json.loads(answer)
        for part in ("own", "keys"):
            if part in found:
                given = {name: to_bytes(one) for name, one in found[part].items()}
                found[part] = {name: to_text(one) for name, one in change(round_, given).items()}
        return canonical(found)

    return changed


UNMASK = {
    "false shares": unmasking_with(lambda round_, s: {n: round_.rng.randbytes(SHARE) for n in s}),
    "one false share": unmasking_with(lambda round_, s: s | {n: bytes(SHARE) for n in sorted(s)[:1]}),
    "swapped shares": unmasking_with(swapped),
    "short shares": unmasking_with(lambda round_, s: {name: one[:3] for name, one in s.items()}),
    "long shares": unmasking_with(lambda round_, s: {name: 3 * one for name, one in s.items()}),
    "no shares": unmasking_with(lambda round_, s: {}),
    "shares of strangers": unmasking_with(lambda round_, s: {f"x{name}": one for name, one in s.items()}),
    "no answer": nothing,
    "no text": no_text,
}
ALL = dict(zip(STEPS, (KEYS, SHARES, TRAIN, CONFIRM, UNMASK), strict=True))
