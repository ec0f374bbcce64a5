"""Random and hostile sequences of messages to one site, and what may be in an answer to each.

The messages are those of honest runs, under eight proposals; three of them have masks, for which two other
certified sites answer here. They come in any order, with another proposal's ticket, without arrays, and the
site is killed between any two states. `Watched.check` looks at what leaves and at the site's disk, not at
what the handler says of itself.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType, RecordDict
from torch import Tensor

from fedfrozen_app.core.digests import digest
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.core.seeds import numpy_generator
from fedfrozen_app.exchange.masking_messages import masking_message, masking_text, with_envelopes
from fedfrozen_app.exchange.messages import (
    Reply,
    read_reply,
    read_train,
    ticket_of,
    train_content,
    train_message,
)
from fedfrozen_app.exchange.proposal import Proposal, read_proposal
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.privacy.sum_noise import DELTA, SumNoise
from fedfrozen_app.secure import client, secagg_messages
from fedfrozen_app.secure.certified import OfThisFederation
from fedfrozen_app.secure.layout import encode
from fedfrozen_app.secure.roster import ProtocolError
from fedfrozen_app.secure.round_keys import derive
from fedfrozen_app.secure.sum_up import Collector, TooFew, new_session
from fedfrozen_app.secure.vector import Vector, unpacked
from fedfrozen_app.secure.work import MASKED, encoded, layout_of, noised, rules_of, terms_of, updates_of
from fedfrozen_app.sites import check_train, handle_train, request_states, store
from fedfrozen_app.sites.approval import Approvals
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.masking import Certified
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.request_handler import RequestHandler
from fedfrozen_app.sites.site_budget import SiteBudget
from fedfrozen_app.sites.store import RunStore
from tests.sites.inprocess import BUNDLE, SiteGrid, Sites

SITE, OTHERS = "north", ("south", "west")
SETTINGS = (
    *("strategy=fedavg", "model=linear", "num_rounds=2", "client.local_epochs=1", "runtime.threads=1"),
    *("client.batch_size=64", "client.optimizer=sgd", "client.weight_decay=0", "client.lr=0.5"),
    *("client.lr_schedule=constant", "checkpoint.every=0"),
)
MASKS = ("secure_aggregation=on", "secure_aggregation.max_examples=200", "secure_aggregation.clip=4")
SUM = ("secure_aggregation.noise=sum", "privacy=dp_sgd")
WORDS = {
    "plain": (),
    "other rate": ("client.lr=0.25",),
    "private": ("privacy=dp_sgd", "privacy.epsilon=0.5"),
    "more private": ("privacy=dp_sgd", "privacy.epsilon=0.3"),
    "masked": MASKS,
    "masked, private": (*MASKS, "privacy=dp_sgd", "privacy.epsilon=0.5"),
    "sum": (*MASKS, *SUM, "privacy.epsilon=4"),
    # The noise does not fit: clients decline before they train.
    "no room": (
        *MASKS[:1],
        *SUM,
        "privacy.epsilon=4",
        "secure_aggregation.bits=16",
        "secure_aggregation.clip=0.001",
    ),
}
POLICY = {
    "strategies": ["fedavg"],
    "rounds_per_day": 50,
    "hellos_per_day": 500,
    "refusals_per_day": 500,
    "max_epsilon": 4.6,
}


class Killed(BaseException):
    """The site's process ends here."""


@dataclass
class Recorded:
    """What an honest server sends under one proposal."""

    proposal: Proposal
    hello: RecordDict
    trains: list[tuple[TrainRequest, dict[str, Tensor]]] = field(default_factory=list)


def forget(kit: Kit) -> None:
    """As if the site had never been asked for anything."""
    for path in (kit.var / "state", kit.approvals):
        shutil.rmtree(path, ignore_errors=True)
    kit.audit.unlink(missing_ok=True)


def record(sites: Sites, words: tuple[str, ...], sent: dict[str, Tensor]) -> Recorded:
    """`sent`: by digest, every array that a site has been sent; a site is sent none twice."""
    hellos, trains = [], []

    class Grid(SiteGrid):
        def run_client(self, message):
            if message.metadata.dst_node_id == 1 and message.metadata.message_type == MessageType.QUERY:
                hellos.append(message.content)
            if message.metadata.dst_node_id == 1 and message.metadata.message_type == MessageType.TRAIN:
                trains.append(read_train(message))
            return super().run_client(message)

    for name in sites.names:
        forget(sites.kit(name))
    try:
        sites.train(*words, make_grid=Grid)
    except (RunFailed, UserError):  # its noise does not fit: the requests were sent all the same
        assert trains
    shutil.rmtree(sites.folder / "run", ignore_errors=True)
    sent |= {digest(value): value for _, arrays in trains for value in arrays.values()}
    found = Recorded(read_proposal(str(hellos[0]["hello"]["proposal"])), hellos[0])
    for request, _ in trains:  # what an earlier message brought was not sent again
        found.trains.append((request, {name: sent[known] for name, known in request.base.items()}))
    return found


@dataclass
class MaskedSession:
    """A server's view of one attempt at a masked round; the two other sites answer at once."""

    request: TrainRequest
    arrays: dict[str, Tensor]
    identities: dict[str, Certified]
    trust: OfThisFederation
    peers: dict[str, client.Session] = field(default_factory=dict)
    envelopes: str = ""
    collector: Collector | None = None
    confirmations: dict[str, bytes] = field(default_factory=dict)

    def question(self, step: str) -> str | None:
        """None if the server has not yet got what it needs for it."""
        session = self.request.masking.session
        if step == "keys":
            return secagg_messages.ask_keys(terms_of(self.request))
        if step == "shares" and self.collector is not None:
            return secagg_messages.ask_shares(self.collector.roster)
        if step == "confirm":
            return secagg_messages.ask_confirmation(session, [SITE, *OTHERS])
        if step == "unmask" and self.confirmations:
            return secagg_messages.ask_unmasking(session, self.confirmations)
        return None

    def take(self, step: str, answer: str) -> None:
        if step == "keys":
            entries = {SITE: secagg_messages.read_entry(answer, SITE, terms_of(self.request), self.trust)}
            for name, identity in self.identities.items():
                self.peers[name], entries[name] = client.begin(name, terms_of(self.request), identity)
            self.collector = Collector(terms_of(self.request), 2)
            self.collector.take_keys(entries)
        elif step == "shares":
            sent = {SITE: secagg_messages.read_envelopes(answer)}
            for name in OTHERS:
                roster = self.collector.roster.text
                self.peers[name], sent[name] = client.share(self.peers[name], roster, self.trust, 2)
            envelopes = self.collector.take_shares(sent)
            for name in OTHERS:
                opened = client.open_envelopes(
                    self.peers[name], envelopes[name], self.collector.present(name)
                )
                self.peers[name] = client.mask(opened, Vector.zeros(1, 1))
            self.envelopes = secagg_messages.envelopes_text(
                self.request.masking.session, envelopes[SITE], self.collector.present(SITE)
            )
        elif step == "confirm":
            survivors = [SITE, *OTHERS]
            self.confirmations[SITE] = secagg_messages.read_signature(
                *(answer, SITE, self.collector.roster, survivors, self.trust)
            )
            for name, identity in self.identities.items():
                self.peers[name], self.confirmations[name] = client.confirm(
                    self.peers[name], [SITE, *OTHERS], identity, 2
                )


class Watched:
    """One site, its messages, and what it did within."""

    def __init__(self, sites: Sites) -> None:
        self.sites, self.kit = sites, sites.kit(SITE)
        sent: dict[str, Tensor] = {}
        self.recorded = {name: record(sites, words, sent) for name, words in WORDS.items()}
        self.identities = {name: Certified.read(sites.folder / "kits" / name) for name in OTHERS}
        self.trust = OfThisFederation.read(self.kit.folder)
        self.context = SiteGrid({SITE: None, **dict.fromkeys(OTHERS)}).contexts[1]
        self.trained: dict[str, list[tuple[str, Reply]]] = defaultdict(list)  # by proposal: (work, reply)
        self.kill: int | None = None  # transitions until the site is killed
        self.sent = self.refused = self.kills = 0
        self.kinds: set[str] = set()

    # The site ------------------------------------------------------------------------------------------

    def fresh(self, **policy: object) -> None:
        forget(self.kit)
        self.kit.approvals.mkdir()
        self.sites.change(SITE, "policy.yaml", **POLICY, **policy)
        self.policy = SimpleNamespace(**policy)
        self.trained.clear()
        self.rounds: dict[str, list[MaskedSession]] = defaultdict(list)
        self.start()

    def start(self) -> None:
        self.handler, self.kill = RequestHandler(self.kit), None

    def give(self, message: Message) -> Message | None:
        """The answer; None if the site was killed. It is started again at once."""
        self.context.node_config.clear()
        try:
            return self.handler.handle(message, self.context, BUNDLE)
        except Killed:
            self.kills += 1
            self.start()
            return None

    # Messages ------------------------------------------------------------------------------------------

    def hello(self, name: str) -> None:
        self.give(Message(self.recorded[name].hello, dst_node_id=1, message_type=MessageType.QUERY))

    def train(self, name: str, rng: np.random.Generator) -> None:
        own = self.recorded[name]
        request, arrays = own.trains[rng.integers(len(own.trains))]
        envelopes = ""
        if request.masking is not None and self.rounds[name]:
            session = self.rounds[name][rng.integers(len(self.rounds[name]))]
            request, arrays, envelopes = session.request, session.arrays, session.envelopes
        ticket, odd = own.proposal.ticket, rng.random()
        if odd < 0.1:  # another proposal's
            ticket = self.recorded[rng.choice(list(WORDS))].proposal.ticket
        elif odd < 0.15:
            request = replace(request, masking=None)
        elif odd < 0.2:
            request = replace(request, plan=replace(request.plan, shared=()), evaluate=True)
        elif odd < 0.25:
            arrays = {}
        self.send_train(request, arrays, ticket, envelopes)

    def send_train(self, request, arrays, ticket, envelopes="") -> None:
        content = train_content(request, arrays, local=False, ticket=ticket)
        if envelopes:
            content = with_envelopes(content, envelopes)
        message = train_message(1, request, content, ttl=3600)
        if (answer := self.give(message)) is not None:
            self.check(message, request, arrays, read_reply(answer))

    def masked_step(self, name: str, step: str, rng: np.random.Generator) -> None:
        own = self.recorded[name]
        if step == "keys":
            request, arrays = own.trains[rng.integers(len(own.trains))]
            request = replace(request, masking=replace(request.masking, session=new_session()))
            self.rounds[name].append(MaskedSession(request, arrays, self.identities, self.trust))
        if not self.rounds[name]:
            return
        session = self.rounds[name][-1 if rng.random() < 0.9 else rng.integers(len(self.rounds[name]))]
        if step == "train":
            self.send_train(session.request, session.arrays, own.proposal.ticket, session.envelopes)
            return
        if (text := session.question(step)) is None:
            return
        number = session.request.round
        answer = self.give(masking_message(1, number, text, ttl=60, ticket=own.proposal.ticket))
        try:
            if answer is not None and answer.has_content():
                session.take(step, masking_text(answer))
        except (ProtocolError, TooFew):  # our own side of a round that the site has left
            pass

    # What may leave ------------------------------------------------------------------------------------

    def check(self, message: Message, request: TrainRequest, arrays, reply: Reply) -> None:
        if not reply.arrays:
            self.refused += 1
            return
        named = ticket_of(message)["proposal"]
        name, own = next((n, r) for n, r in self.recorded.items() if r.proposal.hash == named)
        proposal, secure = own.proposal, own.proposal.secure_aggregation
        self.sent += 1
        self.kinds.add(name)
        self._check_allowed(proposal)
        line = read_audit(self.kit.audit)[-1]
        about = {key: digest(value) for key, value in reply.arrays.items()}
        assert (line["event"], line["proposal"], line["arrays"]) == ("sent", proposal.hash, about), (
            "not logged"
        )
        if proposal.epsilon is not None:
            self._check_paid(proposal, request)
        within = [one for work, one in self.trained[proposal.hash] if work == request.work]
        if secure.name == "on":
            assert set(reply.arrays) == {MASKED} and not reply.examples, "without masks"
            self._check_masked(proposal, request, arrays, reply, within)
        else:
            assert any(same(reply.arrays, one.arrays) for one in within), "another proposal's update"
        if proposal.epsilon is not None and secure.noise != "sum":
            assert all(0 <= one.metrics["epsilon"] <= proposal.epsilon * 1.001 for one in within)

    def _check_allowed(self, proposal: Proposal) -> None:
        policy, decision = self.policy, Approvals(self.kit.approvals).decision(proposal.hash)
        assert proposal.epsilon is not None or not policy.privacy_required, "a run without privacy"
        assert policy.secure_aggregation != "required" or proposal.secure_aggregation.name == "on", "no masks"
        if policy.approval == "ask" or decision is not None:
            assert decision is not None and decision.approved, "nobody has approved it"

    def _check_paid(self, proposal: Proposal, request: TrainRequest) -> None:
        runs = self._charged()
        entry = runs.get(proposal.run.id, {})
        assert entry.get("proposal") == proposal.hash, "charged for another proposal, or not at all"
        assert entry["epsilon"] == proposal.epsilon, "charged something else"
        assert entry["rounds"].get(str(request.round)) == request.work, "its round is not charged"
        assert SiteBudget(self.kit.var / "state" / "budget.json").spent()[0] <= POLICY["max_epsilon"]

    def _check_masked(self, proposal, request, arrays, reply, within) -> None:
        """Take the masks off with the site's own secrets; compare with what it trained for this request."""
        session = self.handler.site.masks.session(proposal.hash)
        roster, rules = session.roster, rules_of(request, 3)
        layout = layout_of(request, arrays)
        vector = unpacked(reply.arrays[MASKED].numpy(), layout.head, rules.bits)
        vector = Vector(vector.head.copy(), vector.body.copy())
        masked = vector.body.copy()
        vector.mask(derive(session.own, roster.digest, "own mask"), subtract=True)
        pair = client.Pair(session.mask)
        for other in OTHERS:
            vector.mask(client.pair_key(pair, roster, other), subtract=other > SITE)
        drawn = [numpy_generator(0, "rounding", SITE, request.round) for _ in within]
        if not noised(request):
            made = [
                encoded(roster, request, one, arrays, drawn_)
                for one, drawn_ in zip(within, drawn, strict=True)
            ]
            assert any((one.body == vector.body).all() for one in made), "another update than its own"
            assert (masked != vector.body).any(), "its vector has no masks"
            return
        size = len(vector.body)
        sigma = SumNoise(
            proposal.epsilon, proposal.privacy.delta or DELTA, proposal.run.num_rounds
        ).multiplier
        share = sigma * (0.5 * rules.scale("", ()) + np.sqrt(size)) / np.sqrt(3)
        found = []
        for one, drawn_ in zip(within, drawn, strict=True):
            updates = updates_of(request, one.arrays, arrays)
            bare = encode(layout, rules, updates, one.examples, one.metrics, drawn_)
            found.append(float((vector.body - bare.body).view(np.int32).astype(float).std()) / share)
        assert any(0.75 < ratio < 1.4 for ratio in found), f"its noise is {found} times what it should be"

    def check_disk(self) -> None:
        """With noise in the sum no update without noise is on the disk."""
        bare = [
            one.arrays["classifier.weight"].contiguous().numpy().tobytes()
            for name in ("sum", "no room")
            for _, one in self.trained[self.recorded[name].proposal.hash]
        ]
        if bare:
            for path in (self.kit.var / "state").rglob("*"):
                content = path.read_bytes() if path.is_file() else b""
                assert not any(one in content for one in bare), f"{path.name} holds an update without noise"
        self._check_stored()

    def _charged(self) -> dict:
        """By run, as the site's record has it."""
        path = self.kit.var / "state" / "budget.json"
        return json.loads(path.read_text())["runs"] if path.exists() else {}

    def _check_stored(self) -> None:
        """What is stored may be sent from then on: its round is charged, for its own proposal."""
        runs = self._charged()
        for own in self.recorded.values():
            proposal = own.proposal
            kept = RunStore(self.kit.var / "state" / proposal.run.id, keep=1)
            for number in kept.rounds(proposal.hash) if proposal.epsilon is not None else ():
                entry = runs.get(proposal.run.id, {})
                assert entry.get("proposal") == proposal.hash, "stored, and charged for another proposal"
                assert str(number) in entry["rounds"], "a reply is stored before its round is charged"


def same(one, other) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


read_of_disk, policies = Policy.read, {}


def read_policy(path: Path) -> Policy:
    """The same text is the same policy: parsing it takes longer than all else."""
    text = path.read_bytes()
    if text not in policies:
        policies[text] = read_of_disk(path)
    return policies[text]


@contextmanager
def started(folder: Path) -> Iterator["Watched"]:
    """Kits in a new folder, and `watching` them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedfrozen_app.report.output.write_curves", lambda *args, **kwargs: None)
        sites = Sites(folder, settings=SETTINGS)
        folder.mkdir()
        sites.prepare()
        for name in (SITE, *OTHERS):
            sites.change(name, "policy.yaml", strategies=["fedavg"], max_epsilon=20, privacy_required=False)
        with watching(sites) as found:
            yield found


@contextmanager
def watching(sites: Sites) -> Iterator[Watched]:
    """With what the site's client returns recorded, its workers kept, and kills between states."""
    found, kept = Watched(sites), {}
    finish_client, advance, worker_for = (
        handle_train.finish_client,
        request_states.advance,
        check_train.worker_for,
    )

    def recording(progress):
        reply, private = finish_client(progress)
        if reply.arrays:
            checked = progress.checked
            known = replace(
                reply, arrays=dict(reply.arrays), examples=checked.run.view.public_count(reply.examples)
            )
            found.trained[checked.proposal.hash].append((checked.request.work, known))
        return reply, private

    def killing(table, progress):
        if found.kill is not None:
            found.kill -= 1
            if found.kill < 0:
                raise Killed
        advance(table, progress)

    def cached(context):
        key = context.node_config["proposal"]
        if key not in kept:
            kept[key] = worker_for(context)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle_train, "finish_client", recording)
        patch.setattr(request_states, "advance", killing)
        patch.setattr(check_train, "worker_for", cached)
        patch.setattr("os.fsync", lambda number: None)  # a kill is no power cut
        patch.setattr(Policy, "read", read_policy)
        patch.setattr(store, "read_proposal", lru_cache(64)(read_proposal))
        yield found


def play(found: Watched, rng: np.random.Generator) -> None:
    """One sequence: some messages under some of the proposals, with kills, restarts and decisions."""
    names = [str(name) for name in rng.choice(list(WORDS), rng.integers(1, 4), replace=False)]
    found.fresh(
        privacy_required=bool(rng.random() < 0.3),
        secure_aggregation=str(rng.choice(["optional"] * 3 + ["required"])),
        approval=str(rng.choice(["policy", "policy", "ask"])),
    )
    accept(found, names[0], rng)
    for _ in range(rng.integers(3, 9)):
        name, what = str(rng.choice(names)), rng.random()
        masks = found.recorded[name].trains[0][0].masking is not None
        if rng.random() < 0.25:
            found.kill = int(rng.integers(0, 10))
        if what < 0.08:
            found.start()
        elif what < 0.25:
            accept(found, name, rng)
        elif what < 0.4 and masks:
            found.masked_step(name, str(rng.choice(["keys", "shares", "train", "confirm", "unmask"])), rng)
        elif what < 0.75 and masks:
            for step in ("keys", "shares", "train", "train", "confirm", "unmask"):
                if rng.random() < 0.93:
                    found.masked_step(name, step, rng)
        else:
            if rng.random() < 0.5:  # as an honest server does; else one proposal rarely follows another
                accept(found, name, rng)
            found.train(name, rng)
    found.check_disk()


def accept(found: Watched, name: str, rng: np.random.Generator) -> None:
    """A hello, after a person's decision where one is asked for."""
    if found.policy.approval == "ask" and rng.random() < 0.8:
        decide = Approvals(found.kit.approvals).decide
        decide(found.recorded[name].proposal.hash, approved=bool(rng.random() < 0.9))
    found.hello(name)
