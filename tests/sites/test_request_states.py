"""Whatever messages a site gets, in whatever order, killed between whatever states: nothing leaves that was
not charged, noised and masked as its own proposal says."""

import dataclasses
import os

import numpy as np
import pytest

from fedfrozen_app.files.seal import unsealed
from fedfrozen_app.secure import client, work
from fedfrozen_app.sites import handle_train
from fedfrozen_app.sites.request_states import FINAL, State
from fedfrozen_app.sites.site_budget import SiteBudget
from fedfrozen_app.sites.site_state import SiteState
from fedfrozen_app.sites.store import RunStore
from tests.sites.request_sequences import WORDS, play, started

SEQUENCES = int(os.environ.get("REQUEST_SEQUENCES", "20000"))


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    with started(tmp_path_factory.mktemp("states") / "sites") as found:
        yield found


def played(watched, count, seed):
    rng = np.random.default_rng(seed)
    before = watched.sent, watched.refused, watched.kills
    for _ in range(count):
        play(watched, rng)
    after = watched.sent, watched.refused, watched.kills
    return tuple(now - then for now, then in zip(after, before, strict=True))


@pytest.mark.slow
def test_some_sequences(watched):
    sent, refused, kills = played(watched, 40, seed=0)
    assert sent > 10 and refused > 10 and kills > 2


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_thousand_sequences(watched):
    sent, refused, kills = played(watched, SEQUENCES, seed=1)
    print(f"{SEQUENCES} sequences: {sent} updates sent, {refused} requests refused, {kills} kills")
    assert min(sent, refused, kills) > SEQUENCES / 20
    assert watched.kinds == set(WORDS) - {"no room"}


def uncharged(patch):
    patch.setattr(SiteBudget, "begin", lambda *args: None)
    patch.setattr(SiteBudget, "charge", lambda *args: None)


def without_noise(patch):
    patch.setattr(work, "add_noise", lambda *args: None)


def without_masks(patch):
    patch.setattr(client, "mask", lambda session, vector: dataclasses.replace(session, state=client.MASKED))


def unasked(patch):
    patch.setattr(SiteState, "is_waiting", lambda *args: False)


def of_any_proposal(patch):
    """Replies are found by run and round, as in an earlier version."""
    reply_to = RunStore.reply_to

    def found(self, proposal, server_round, request):
        for path in sorted(self.folder.glob(f"*/{server_round}/*.json")):
            if (reply := reply_to(self, path.stem, server_round, unsealed(path)["order"])) is not None:
                return dataclasses.replace(reply, request=request)
        return None

    patch.setattr(RunStore, "reply_to", found)


def charged_as_it_leaves(patch):
    """Later than it is stored: a site that is killed in between has a reply that nobody paid for."""
    charge, owed = SiteBudget.charge, []

    def pay(progress):
        while owed:
            charge(*owed.pop())
        handle_train.send(progress)

    rows = tuple(
        dataclasses.replace(row, step=pay) if row.after is State.SENT else row
        for row in handle_train.TRANSITIONS
    )
    patch.setattr(handle_train, "TRANSITIONS", rows)
    patch.setattr(SiteBudget, "charge", lambda *args: owed.append(args))


PLANTED = (uncharged, charged_as_it_leaves, without_noise, without_masks, unasked, of_any_proposal)
FAULTS = {fault.__name__: fault for fault in PLANTED}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(watched, monkeypatch, fault):
    """Without the guards, which would stop most of them."""
    rows = tuple(dataclasses.replace(row, guard=lambda progress: None) for row in handle_train.TRANSITIONS)
    monkeypatch.setattr(handle_train, "TRANSITIONS", rows)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        played(watched, 2_000, seed=2)


@pytest.mark.slow
def test_the_guards_stop_what_is_not_charged(watched, monkeypatch):
    uncharged(monkeypatch)
    watched.kinds.clear()
    played(watched, 25, seed=2)
    assert watched.kinds <= {"plain", "other rate", "masked"}


def test_every_way_to_the_end_of_the_table_is_charged_noised_and_stored():
    """Whatever the steps do: the table has no other way to an answer with an update."""

    def ways(state, before):
        if state in FINAL:
            yield state, before
        for row in handle_train.TRANSITIONS:
            if row.before is state:
                yield from ways(row.after, (*before, row.after))

    found = list(ways(State.RECEIVED, ()))
    assert {state for state, _ in found} == set(FINAL)
    for state, way in found:
        if state is State.SENT:
            assert way[:3] == (State.CHECKED, State.APPROVED, State.ADMITTED)
            assert State.RECALLED in way or way[3:6] == (State.PREPARED, State.CHARGED, State.TRAINED)
            assert way[-5:] == (State.NOISED, State.STORED, State.MASKED, State.LOGGED, State.SENT)
