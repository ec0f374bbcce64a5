"""Masked rounds over real kits: certificates, policies and audit logs; and a server that means harm."""

import json
from dataclasses import replace

import pytest
import yaml
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from fedfrozen_app.core.certificates import read_certificate
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.exchange.masking_messages import MASKING, masking_text
from fedfrozen_app.exchange.messages import read_reply
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.exchange.train_request import read_train_request
from fedfrozen_app.secure import client, secagg_messages
from fedfrozen_app.secure.roster import Entry, to_text
from fedfrozen_app.secure.round_keys import Simulated, new_seed
from fedfrozen_app.secure.work import MASKED
from fedfrozen_app.sites.authority import Signer
from fedfrozen_app.sites.masking import Certified
from fedfrozen_app.sites.request_handler import RequestHandler
from tests.conftest import slowly
from tests.secure.attacks import ROUND, Hostile, attack, content, log, ticket, with_roster
from tests.secure.runs import ON, PLAIN, within_rounding
from tests.sites.inprocess import SiteGrid

TWO = "secure_aggregation.min_cohort=2"


def require(sites, **more):
    for name in sites.names:
        sites.change(name, "policy.yaml", secure_aggregation="required", **more)


def test_a_masked_run_over_three_sites_and_its_record(sites):
    words = ("num_rounds=2", "strategy.warmup_rounds=1", *PLAIN)
    plain = sites.train(*words, "run_id=plain", folder="plain")
    require(sites)
    masked = sites.train(*words, ON, folder="masked")
    within_rounding(plain, masked)
    assert masked.rows[1]["train_loss"] == pytest.approx(plain.rows[1]["train_loss"], abs=1e-3)
    entries = [entry for entry in log(sites) if entry.get("run") == "test"]
    one_round = ["keys", "roster", "sent", "confirmed", "unmasked"]
    assert [entry["event"] for entry in entries] == ["hello", *one_round, *one_round]
    keys, roster, sent, confirmed, unmasked = entries[1:6]
    assert roster["cohort"] == list(sites.names) == sent["masked"]["cohort"] == confirmed["survivors"]
    assert sent["masked"]["neighbours"] == ["south", "west"] and sent["masked"]["needed"] == 2
    assert roster["roster"] == sent["masked"]["roster"] and len(roster["roster"]) == 64
    assert len({e["session"] for e in (keys, roster, confirmed, unmasked)} | {sent["masked"]["session"]}) == 1
    assert list(sent["arrays"]) == [MASKED] and sent["examples"] == 0 and sent["metrics"] == {}
    assert "train_loss" in sent["masked"]["figures"] and len(sent["masked"]["arrays"]) > 20
    assert len(entries[8]["masked"]["arrays"]) < len(sent["masked"]["arrays"])  # the kernel stays home
    assert entries[6]["session"] != roster["session"]


@pytest.mark.slow
def test_figures_that_a_policy_keeps_are_in_no_sum(sites):
    for name in sites.names:
        sites.change(name, "policy.yaml", metrics=False)
    run = sites.train(*ROUND)
    assert "train_loss" not in run.rows[1] and run.rows[1]["clients_ok"] == 3
    assert next(e for e in log(sites) if e["event"] == "sent")["masked"]["figures"] == []


def test_metrics_that_one_site_alone_gives_are_in_no_sum(sites):
    """Its sum would be its own loss."""
    for name in ("south", "west"):
        sites.change(name, "policy.yaml", metrics=False)
    run = sites.train(*ROUND)
    assert run.rows[1]["clients_ok"] == 3
    assert not {"train_loss", "client_val_before", "client_val_after", "client_seconds"} & set(run.rows[1])
    # The site itself writes down that its metrics went into the vector.
    assert "train_loss" in next(e for e in log(sites) if e["event"] == "sent")["masked"]["figures"]


def refused(sites, *words, name="north"):
    with pytest.raises((RunFailed, UserError)):
        sites.train(*words)
    return log(sites, name)[-1]["reason"]


def test_a_site_that_asks_for_masks_takes_no_part_without(sites):
    require(sites)
    assert "masked rounds only" in refused(sites, "num_rounds=1", "strategy.warmup_rounds=1")


FLOORS = {
    "min_cohort": ("min_cohort=4", "secure_aggregation.min_cohort=3, and it asks for 4"),
    "min_threshold": ("min_threshold=0.75", "secure_aggregation.threshold=0.6667, and it asks for 0.75"),
    "min_neighbours": ("min_neighbours=200", "secure_aggregation.neighbours=160, and it asks for 200"),
}


@pytest.mark.parametrize("key", ["min_neighbours", *slowly("min_cohort", "min_threshold")])
def test_a_proposal_below_the_policy_s_floors_is_refused(sites, key):
    words, sentence = FLOORS[key]
    require(sites, **yaml.safe_load(words.replace("=", ": ")))
    assert sentence in refused(sites, *ROUND)
    assert [entry["event"] for entry in log(sites)] == ["refused"]


def test_a_cohort_below_the_proposal_s_is_refused(sites):
    def tampers(grid, step, site, text):
        return with_roster(text, lambda r: r[:2]) if step == "shares" else text

    reasons, events, _ = attack(sites, tampers)
    assert any("the cohort has 2 clients, and it asks for 3" in r for r in reasons["north"]), reasons
    assert "sent" not in events and "roster" not in events


@pytest.mark.parametrize(("value", "sentence"), [("on", "must be required or optional"), (True, "must be")])
def test_a_policy_with_another_word_is_no_policy(sites, value, sentence):
    sites.change("north", "policy.yaml", secure_aggregation=value)
    with pytest.raises(UserError, match=sentence):
        sites.restart()


# A server that means harm -------------------------------------------------------------------------------


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
                grid.terms = secagg_messages.read_terms(json.loads(text)["terms"])
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
            grid.terms = secagg_messages.read_terms(json.loads(text)["terms"])
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
    words = (*ROUND, TWO, "aggregation.cohorts=free")
    reasons, events, _ = attack(sites, tampers, *words, fails=False)
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


def test_both_halves_of_a_secret_are_never_given(sites):
    """After south was confirmed as in the sum, north is asked to say that it dropped out; and again."""
    asked = []

    def tampers(grid, step, site, text):
        if step == "unmask" and site == "north" and not asked:
            session = json.loads(text)["session"]
            without = secagg_messages.ask_confirmation(session, ["north", "west"])
            asked.append(read_masking(grid.again("north", without, ticket(sites))))
        return text

    reasons, _, grid = attack(sites, tampers, fails=False)
    assert asked == [None]  # the one refusal
    assert "the step confirm was asked for when the round was at 'confirmed'" in reasons["north"][-1]
    # Once more, when all is over: nothing is left to ask for.
    last = [json.loads(grid.taken["unmask", site]) for site in sites.names]
    assert all(set(given["own"]) == set(sites.names) and given["keys"] == {} for given in last)
    session = next(e for e in log(sites) if e["event"] == "roster")["session"]
    for question in (
        secagg_messages.ask_unmasking(session, {}),
        secagg_messages.ask_confirmation(session, ["north", "west"]),
    ):
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
            return secagg_messages.ask_confirmation(json.loads(text)["session"], ["north", "south"])
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
            seen.append(read_reply(SiteGrid.run_client(grid, message)))
        return text

    class ReplyToStore(Hostile):
        def run_client(self, message):
            if "order" in message.content and message.metadata.dst_node_id == 1:
                self.last = message
            return super().run_client(message)

    def make_grid(executors, bundle):
        grid = ReplyToStore(executors, bundle)
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
            return secagg_messages.ask_confirmation(json.loads(text)["session"], ["north", "south"])
        return text

    reasons, _, _ = attack(sites, tampers, *words)
    assert any("was summed over other sites before" in r for r in reasons["north"])


@pytest.mark.slow
@pytest.mark.parametrize("cohorts", ["free", "batches"])
def test_an_executor_that_is_killed_at_a_step_has_dropped_out_of_that_round_alone(sites, cohorts):
    """West's process ends at another step of each round, and a new one knows what its disk knows.

    Sums over the others are for sites that compare sums of one model alone; a batch is whole, or has no sum.
    """
    steps = {"1": "keys", "2": "shares", "3": "order", "4": "confirm", "5": "unmask"}

    class Killed(SiteGrid):
        def run_client(self, message):
            kind, number = message.metadata.message_type, message.metadata.group_id
            step = json.loads(masking_text(message))["step"] if kind == MASKING else "order"
            west = self.executors[message.metadata.dst_node_id - 1].kit.name == "west"
            if west and steps.get(number) == step:
                self.executors[message.metadata.dst_node_id - 1] = RequestHandler(sites.kit("west"))
                return Message(Error(ErrorCode.CLIENT_APP_CRASHED, "killed"), reply_to=message)
            return super().run_client(message)

    content(sites)
    for name in sites.names:
        sites.change(name, "policy.yaml", differencing="model" if cohorts == "free" else "data")
    words = (ON, TWO, "num_rounds=6", "strategy.warmup_rounds=3", f"aggregation.cohorts={cohorts}")
    run = sites.train(*words, *PLAIN, make_grid=Killed)
    over = 2 if cohorts == "free" else None
    assert [row["secure"].get("summed") for row in run.rows[1:]] == [over, over, over, 3, 3, 3]
    assert ["discarded" in row for row in run.rows[1:]] == [over is None] * 3 + [False] * 3


def test_entries_are_read_strictly():
    with pytest.raises(ValueError, match="an entry that is none"):
        Entry.read(["north", "AAAA", "AAAA", "", ""])
    request = read_train_request(
        '{"round":1,"trained":[],"shared":[],"private":[],"base":{},"algorithm":"fedavg","settings":{}}'
    )
    assert request.masking is None and request.work == request.digest
    assert replace(request, round=2).work != request.work
