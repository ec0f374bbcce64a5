"""Masked rounds over real kits: certificates, policies and audit logs; and a server that means harm."""

import json
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from fedfrozen_app.errors import RunFailed, UserError
from fedfrozen_app.exchange.messages import (
    MASKING,
    envelopes_of,
    masking_message,
    masking_text,
    order_text,
    read_reply,
)
from fedfrozen_app.exchange.order import read_order
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.secure import client, talk
from fedfrozen_app.secure.roster import Entry, to_text
from fedfrozen_app.secure.round_keys import Simulated, new_seed
from fedfrozen_app.secure.work import MASKED
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.authority import Signer, read_certificate
from fedfrozen_app.sites.desk import Executor
from fedfrozen_app.sites.masking import Certified
from tests.secure.test_rounds import ON, PLAIN, within_rounding
from tests.sites.inprocess import SiteGrid

TWO = "secure_aggregation.min_cohort=2"
ROUND = (ON, "num_rounds=1", "strategy.warmup_rounds=1", *PLAIN)


def log(sites, name="north"):
    return read_audit(sites.kit(name).audit)


def require(sites, **more):
    for name in sites.names:
        sites.change(name, "policy.yaml", secure_aggregation="required", **more)


def content(sites):
    """With two sites in a sum: of three, one may go."""
    for name in sites.names:
        sites.change(name, "policy.yaml", min_cohort=2)


def test_a_masked_run_over_three_sites_and_its_record(sites):
    words = ("num_rounds=2", "strategy.warmup_rounds=1", *PLAIN)
    plain = sites.train(*words, "run_id=plain", folder="plain")
    require(sites)
    masked = sites.train(*words, ON, folder="masked")
    within_rounding(plain, masked)
    assert masked.rows[1]["train_loss"] == pytest.approx(plain.rows[1]["train_loss"], abs=1e-3)
    entries = [entry for entry in log(sites) if entry.get("run") == "test"]
    one_round = ["roster", "sent", "confirmed", "unmasked"]
    assert [entry["event"] for entry in entries] == ["hello", *one_round, *one_round]
    roster, sent, confirmed, unmasked = entries[1:5]
    assert roster["cohort"] == list(sites.names) == sent["masked"]["cohort"] == confirmed["survivors"]
    assert sent["masked"]["neighbours"] == ["south", "west"] and sent["masked"]["needed"] == 2
    assert roster["roster"] == sent["masked"]["roster"] and len(roster["roster"]) == 64
    assert len({e["session"] for e in (roster, confirmed, unmasked)} | {sent["masked"]["session"]}) == 1
    assert list(sent["arrays"]) == [MASKED] and sent["examples"] == 0 and sent["metrics"] == {}
    assert "train_loss" in sent["masked"]["figures"] and len(sent["masked"]["arrays"]) > 20
    assert len(entries[6]["masked"]["arrays"]) < len(sent["masked"]["arrays"])  # the kernel stays home
    assert entries[5]["session"] != roster["session"]


@pytest.mark.slow
def test_figures_that_a_policy_keeps_are_in_no_sum(sites):
    for name in sites.names:
        sites.change(name, "policy.yaml", metrics=False)
    run = sites.train(*ROUND)
    assert "train_loss" not in run.rows[1] and run.rows[1]["clients_ok"] == 3
    assert next(e for e in log(sites) if e["event"] == "sent")["masked"]["figures"] == []


def refused(sites, *words, name="north"):
    with pytest.raises((RunFailed, UserError)):
        sites.train(*words)
    return log(sites, name)[-1]["reason"]


def test_a_site_that_asks_for_masks_takes_no_part_without(sites):
    require(sites)
    assert "masked rounds only" in refused(sites, "num_rounds=1", "strategy.warmup_rounds=1")


def test_a_cohort_below_the_policy_s_is_refused(sites):
    require(sites, min_cohort=4)
    assert "the cohort has 3 clients, and it asks for 4" in refused(sites, *ROUND)


@pytest.mark.parametrize(("value", "sentence"), [("on", "must be required or optional"), (True, "must be")])
def test_a_policy_with_another_word_is_no_policy(sites, value, sentence):
    sites.change("north", "policy.yaml", secure_aggregation=value)
    with pytest.raises(UserError, match=sentence):
        sites.restart()


# A server that means harm -------------------------------------------------------------------------------


class Hostile(SiteGrid):
    """Changes what is on its way to the sites; `tampers` gets the step, the site and the text."""

    tampers = staticmethod(lambda grid, step, site, text: text)
    taken: dict[tuple[str, str], str] = {}  # noqa: RUF012

    def _answer(self, message: Message) -> Message:
        site = self.executors[message.metadata.dst_node_id - 1].kit.name
        content = message.content
        if message.metadata.message_type == MASKING:
            text = masking_text(message)
            step = json.loads(text)["step"]
            changed = self.tampers(self, step, site, text)
            content["masking"] = ConfigRecord({"json": changed})
        elif "order" in content:
            text = self.tampers(self, "order", site, order_text(message))
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
        answer = super()._answer(message)
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
        return SiteGrid._answer(self, message)


def attack(sites, tampers, *words, fails=True):
    """Run a round through a server that tampers; the reasons that the sites wrote down."""
    grids = []

    def make_grid(executors, bundle):
        grid = Hostile(executors, bundle)
        grid.tampers, grid.taken = tampers, {}
        grids.append(grid)
        return grid

    if fails:
        with pytest.raises((RunFailed, UserError)):
            sites.train(*(words or ROUND), make_grid=make_grid)
    else:
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


def invented(terms, identity, name="ward"):
    _, entry = client.begin(name, terms, identity)
    return entry.plain


def test_an_invented_neighbour_is_refused(sites):
    """With a key of its own, with a certificate of another authority, with the server's own certificate."""
    stranger = Signer.make()
    key = Certified.read(sites.folder / "kits" / "north").key
    forged = Certified(key, stranger.issue(key.public_key(), "ward", "site", 10))
    server = sites.folder / "kits" / "server"
    own = Certified(
        load_pem_private_key((server / "server.key").read_bytes(), None),
        read_certificate(server / "server.crt"),
    )
    sentences = ("it shows no certificate", "not of this federation's authority", "that of the server")
    for identity, sentence in zip((Simulated(new_seed()), forged, own), sentences, strict=True):

        def tampers(grid, step, site, text, identity=identity):
            if step == "keys":
                grid.terms = talk.read_terms(json.loads(text)["terms"])
            return (
                with_roster(text, lambda r: [*r, invented(grid.terms, identity)])
                if step == "shares"
                else text
            )

        reasons, events, _ = attack(sites, tampers, *ROUND, f"run_id=run-{len(sentence)}")
        assert all(sentence in found[-1] for found in reasons.values()), reasons
        assert "sent" not in events and "roster" not in events


def test_a_neighbour_under_the_name_of_another_site_is_refused(sites):
    """North's true certificate, which the server has seen, beside keys that the server drew."""

    def tampers(grid, step, site, text):
        if step != "shares":
            return text

        def change(roster):
            north = next(entry for entry in roster if entry[0] == "north")
            drawn = client.begin("north", grid.terms, Simulated(new_seed()))[1]
            return [
                [*entry]
                if entry[0] != "north"
                else ["north", to_text(drawn.cipher), to_text(drawn.mask), *north[3:]]
                for entry in roster
            ]

        return with_roster(text, change)

    def first(grid, step, site, text):
        if step == "keys":
            grid.terms = talk.read_terms(json.loads(text)["terms"])
        return tampers(grid, step, site, text)

    reasons, events, _ = attack(sites, first)
    assert all("its signature is another's" in found[-1] for found in reasons.values())
    assert "sent" not in events


def test_keys_of_an_earlier_round_are_refused(sites):
    """The server replays what a site said in the first round, in the second."""
    kept: dict[str, list] = {}

    def tampers(grid, step, site, text):
        if step == "shares":
            roster = json.loads(text)["roster"]
            if kept:
                return with_roster(text, lambda r: [kept["west"] if e[0] == "west" else e for e in r])
            if site == "west":
                kept.update({entry[0]: entry for entry in roster})
        return text

    words = (ON, "num_rounds=2", "strategy.warmup_rounds=1", *PLAIN)
    reasons, events, _ = attack(sites, tampers, *words, fails=False)
    assert "its signature is another's" in reasons["north"][-1]
    assert events.count("sent") == 3  # of the first round


def test_two_rosters_to_two_sites_are_noticed(sites):
    """North is shown a roster without west, south and west the whole: they cannot read each other."""

    def tampers(grid, step, site, text):
        if step == "shares" and site == "north":
            return with_roster(text, lambda r: [entry for entry in r if entry[0] != "west"])
        if step == "envelopes":
            found = json.loads(text)
            own = {s: json.loads(grid.taken["shares", s])["envelopes"] for s in sites.names}
            found["envelopes"] = {s: own[s][site] for s in sites.names if s != site and site in own[s]}
            if site == "north":
                found["envelopes"].pop("west", None)
            return canonical(found)
        return text

    # With whole cohorts of three, or a policy that is content with two: either way nothing leaves.
    reasons, events, _ = attack(sites, tampers)
    assert any("the cohort has 2 clients" in reason for reason in reasons["north"])
    content(sites)
    words = (*ROUND, TWO, "run_id=second")
    reasons, events, _ = attack(sites, lambda *given: shown(*given, tampers), *words)
    assert any("cannot be opened" in r for found in reasons.values() for r in found), reasons
    assert "unmasked" not in events


def shown(grid, step, site, text, tampers):
    if step == "envelopes" and ("shares", site) not in grid.taken:
        return text
    return tampers(grid, step, site, text)


def test_a_cohort_of_one_is_refused(sites):
    def tampers(grid, step, site, text):
        return (
            with_roster(text, lambda r: [entry for entry in r if entry[0] == site])
            if step == "shares"
            else text
        )

    reasons, events, _ = attack(sites, tampers)
    assert all("names nobody else" in found[-1] for found in reasons.values())
    assert "sent" not in events


def test_a_changed_plan_is_refused(sites):
    """One site is asked for another plan than its keys were signed for: its update would stand alone."""

    def tampers(grid, step, site, text):
        if step == "order" and site == "north":
            found = json.loads(text)
            found["trained"], found["shared"] = found["trained"][:3], found["shared"][:3]
            return json.dumps(found, separators=(",", ":"))
        return text

    content(sites)
    reasons, events, _ = attack(sites, tampers, *ROUND, TWO, fails=False)
    assert "not the one that the round's keys were signed for" in reasons["north"][-1]
    assert events.count("sent") == 2 and events.count("unmasked") == 2  # the two others made a sum


def test_an_order_without_masks_is_refused(sites):
    def tampers(grid, step, site, text):
        if step == "order":
            found = json.loads(text)
            del found["masking"]
            return json.dumps(found, separators=(",", ":"))
        return text

    reasons, events, _ = attack(sites, tampers)
    assert all("with masks where the proposal has none, or the other way" in r[-1] for r in reasons.values())
    assert "sent" not in events


@pytest.mark.parametrize("key", ["clip", pytest.param("threshold", marks=pytest.mark.slow)])
def test_other_masks_than_the_proposal_s_are_refused(sites, key):
    def tampers(grid, step, site, text):
        if step == "order":
            found = json.loads(text)
            found["masking"]["settings"][key] = 0.9
            return json.dumps(found, separators=(",", ":"))
        return text

    reasons, _, _ = attack(sites, tampers)
    assert all("in another way than the proposal" in found[-1] for found in reasons.values())


def ticket(sites) -> dict[str, str]:
    entry = next(e for e in log(sites) if e["event"] == "roster")
    return {"run": entry["run"], "proposal": entry["proposal"]}


def test_both_halves_of_a_secret_are_never_given(sites):
    """After south was confirmed as in the sum, north is asked to say that it dropped out; and again."""
    asked = []

    def tampers(grid, step, site, text):
        if step == "unmask" and site == "north" and not asked:
            session = json.loads(text)["session"]
            without = talk.ask_confirmation(session, ["north", "west"])
            asked.append(read_masking(grid.again("north", without, ticket(sites))))
        return text

    reasons, _, grid = attack(sites, tampers, fails=False)
    assert asked == [None]  # the one refusal
    assert "the step confirm was asked for when the round was at 'confirmed'" in reasons["north"][-1]
    # Once more, when all is over: nothing is left to ask for.
    last = [json.loads(grid.taken["unmask", site]) for site in sites.names]
    assert all(set(given["own"]) == set(sites.names) and given["keys"] == {} for given in last)
    session = next(e for e in log(sites) if e["event"] == "roster")["session"]
    for question in (talk.ask_unmasking(session, {}), talk.ask_confirmation(session, ["north", "west"])):
        assert read_masking(grid.again("north", question, ticket(sites))) is None
    assert "it has not begun, or has ended" in log(sites)[-1]["reason"]


def read_masking(message):
    try:
        return masking_text(message)
    except ValueError:
        return None


def test_two_lists_of_survivors_are_noticed(sites):
    """North is told that west is in the sum, south that it is not: neither gives a share."""

    def tampers(grid, step, site, text):
        if step == "confirm" and site == "south":
            return talk.ask_confirmation(json.loads(text)["session"], ["north", "south"])
        return text

    content(sites)
    reasons, events, _ = attack(sites, tampers, *ROUND, TWO)
    assert any("has signed another list of survivors" in r for found in reasons.values() for r in found)
    assert "unmasked" not in events


def test_an_order_is_masked_once_in_a_session(sites):
    """The same order again, in the same session: two vectors with one mask would tell their difference."""
    seen = []

    def tampers(grid, step, site, text):
        if step == "confirm" and site == "north" and not seen:
            message = grid.last
            seen.append(read_reply(SiteGrid._answer(grid, message)))
        return text

    class Keeping(Hostile):
        def _answer(self, message):
            if "order" in message.content and message.metadata.dst_node_id == 1:
                self.last = message
            return super()._answer(message)

    def make_grid(executors, bundle):
        grid = Keeping(executors, bundle)
        grid.tampers, grid.taken = tampers, {}
        return grid

    sites.train(*ROUND, make_grid=make_grid)
    assert seen[0].declined and not seen[0].arrays
    assert (
        "the step mask was asked for when the round was at 'masked'"
        in [e["reason"] for e in log(sites) if e["event"] == "refused"][-1]
    )


@pytest.mark.slow
def test_a_round_that_is_asked_for_again_has_new_masks_and_the_same_survivors(sites, monkeypatch):
    """The server dies after the first round was unmasked, and resumes before it: the update is masked anew.
    A second sum of the round over fewer sites is refused, whose difference would be one site's update."""
    content(sites)
    words = (ON, TWO, "num_rounds=2", "strategy.warmup_rounds=2", *PLAIN)
    first = sites.train(*words, folder="first")
    sent = [e for e in log(sites) if e["event"] == "sent"]
    again = sites.train(*words, folder="again")  # the same run, from its beginning
    within_rounding(first, again)
    later = [e for e in log(sites) if e["event"] == "sent"][len(sent) :]
    # Of the last rounds the very update is kept, and is not trained again.
    assert [e["order"] for e in later] == [e["order"] for e in sent]
    assert [e["arrays"] for e in later] != [e["arrays"] for e in sent]
    assert {e["masked"]["session"] for e in later}.isdisjoint(e["masked"]["session"] for e in sent)

    def tampers(grid, step, site, text):
        if step == "confirm":
            return talk.ask_confirmation(json.loads(text)["session"], ["north", "south"])
        return text

    reasons, _, _ = attack(sites, tampers, *words)
    assert any("was summed over other sites before" in r for r in reasons["north"])


@pytest.mark.slow
def test_an_executor_that_is_killed_at_a_step_has_dropped_out_of_that_round_alone(sites):
    """West's process ends at another step of each round, and a new one knows what its disk knows."""
    steps = {"1": "keys", "2": "shares", "3": "order", "4": "confirm", "5": "unmask"}

    class Killed(SiteGrid):
        def _answer(self, message):
            kind, number = message.metadata.message_type, message.metadata.group_id
            step = json.loads(masking_text(message))["step"] if kind == MASKING else "order"
            west = self.executors[message.metadata.dst_node_id - 1].kit.name == "west"
            if west and steps.get(number) == step:
                self.executors[message.metadata.dst_node_id - 1] = Executor(sites.kit("west"))
                return Message(Error(ErrorCode.CLIENT_APP_CRASHED, "killed"), reply_to=message)
            return super()._answer(message)

    content(sites)
    run = sites.train(ON, TWO, "num_rounds=6", "strategy.warmup_rounds=3", *PLAIN, make_grid=Killed)
    assert [row["secure"]["summed"] for row in run.rows[1:]] == [2, 2, 2, 3, 3, 3]
    assert [row["clients_ok"] for row in run.rows[1:]] == [2, 2, 2, 3, 3, 3]
    assert not any("discarded" in row for row in run.rows)


def test_entries_are_read_strictly():
    with pytest.raises(ValueError, match="an entry that is none"):
        Entry.read(["north", "AAAA", "AAAA", "", ""])
    order = read_order(
        '{"round":1,"trained":[],"shared":[],"private":[],"base":{},"algorithm":"fedavg","settings":{}}'
    )
    assert order.masking is None and order.work == order.digest
    assert replace(order, round=2).work != order.work
