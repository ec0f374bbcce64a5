"""The server and some sites try to set a victim apart: they redraw keys, hide envelopes, name drop-outs, ask
again. What they reach is what `bounds` says."""

import itertools
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from fedfrozen_app.secure import client, shares
from fedfrozen_app.secure.bounds import (
    SAFE,
    chance,
    chance_of_group,
    least_honest,
    least_needed,
    most_colluders,
)
from fedfrozen_app.secure.roster import NEIGHBOURS, ProtocolError, Roster, holders
from fedfrozen_app.secure.round_keys import Pair, derive
from fedfrozen_app.secure.shares import SHARE
from fedfrozen_app.secure.vector import Vector
from tests.secure.parties import TRUST, Round, terms

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import mask_bounds as benchmark

ROOT = Path(__file__).parents[2]
VICTIM = "site-00"
THRESHOLD = 2 / 3


LATER = [pytest.param(*some, marks=pytest.mark.slow) for some in ((12, 6, 3), (16, 4, 5), (12, 4, 2))]


def begun(size: int, neighbours: int) -> tuple[Round, Roster]:
    found = Round([f"site-{number:02}" for number in range(size)], terms(neighbours=neighbours))
    found.keys()
    return found, found.collector.roster


# The attack -----------------------------------------------------------------------------------------------


def test_redrawn_keys_do_not_choose_a_victim_s_neighbours():
    """Once, neighbours followed from the roster's digest: of ten sites with two neighbours each, two that
    colluded drew keys anew until the digest made them the victim's, after 43 tries."""
    found, roster = begun(10, 2)
    bad = ("site-08", "site-09")
    counts = dict.fromkeys(roster.names, 0)
    for _ in range(60):
        for name in bad:  # whatever keys they show
            found.sessions[name], entry = client.begin(name, found.terms, found.identities[name])
            roster = Roster(found.terms, tuple(entry if e.name == name else e for e in roster.entries))
        # A new session each time: that is what a site counts.
        found.sessions[VICTIM], own = client.begin(VICTIM, found.terms, found.identities[VICTIM])
        roster = Roster(found.terms, (own, *roster.entries[1:]))
        session, _ = client.share(found.sessions[VICTIM], roster.text, TRUST, 2)
        for name in session.drawn:
            counts[name] += 1
    drawn = [counts[name] for name in roster.names[1:]]
    assert counts[VICTIM] == 0 and sum(drawn) == 120
    # Each of nine is drawn 13 times on average, with a standard deviation of 3; once, two were drawn always.
    assert max(drawn) < 35


def test_a_session_is_shown_one_roster():
    """No second draw for other keys of the colluders."""
    found, roster = begun(10, 2)
    session, _ = client.share(found.sessions[VICTIM], roster.text, TRUST, 2)
    _, entry = client.begin("site-09", found.terms, found.identities["site-09"])
    other = Roster(found.terms, (*roster.entries[:-1], entry))
    with pytest.raises(ProtocolError, match="the step shares was asked for when the round was at 'shares'"):
        client.share(session, other.text, TRUST, 2)


def set_apart(found: Round, roster: Roster, victim: str, bad: set[str]) -> bool:
    """The whole attack: whether the server has the victim's vector in the end.

    It says that the victim's honest neighbours dropped out, so that the others give their mask keys away. It
    lets no envelope through to the victim but those of colluders and of these.
    """
    sent: dict[str, dict[str, bytes]] = {}
    for name in found.names:
        found.sessions[name], sent[name] = client.share(found.sessions[name], roster.text, TRUST, 2)
    drawn = found.sessions[victim].drawn
    out = [name for name in drawn if name not in bad][: len(roster.names) - roster.needed]
    secret = np.arange(5, dtype="<u4")
    vector = Vector(np.zeros(2, "<u8"), secret.copy())
    for name in found.names:
        here = {
            o: sent[o][name] for o in found.names if name in sent[o] and (name != victim or o in {*bad, *out})
        }
        opened = client.open_envelopes(found.sessions[name], here, found.sessions[name].drawn)
        own = vector if name == victim else Vector.zeros(2, 5)
        found.sessions[name] = client.mask(opened, own)
    survivors = [name for name in found.names if name not in out]
    signed = {}
    for name in survivors:
        session, signed[name] = client.confirm(found.sessions[name], survivors, found.identities[name], 2)
        found.sessions[name] = session
    own_shares, key_shares = {}, {name: {} for name in out}
    for name in found.names:
        if name in bad:  # all that it holds
            held = found.sessions[name].held
            own, keys = (
                {o: both[part] for o, both in held.items()} for part in (slice(SHARE), slice(SHARE, None))
            )
        elif name in survivors:
            _, own, keys = client.unmask(found.sessions[name], signed, TRUST)
        else:
            continue
        if victim in own:
            own_shares[name] = own[victim]
        for other in set(keys) & set(out):
            key_shares[other][name] = keys[other]
    try:
        seed = shares.combine(own_shares, holders(victim, drawn), roster.shares_needed)
        pairs = {
            name: Pair(found.sessions[name].mask) for name in found.sessions[victim].partners if name in bad
        }
        for name in out:
            everyone = holders(name, found.sessions[name].drawn)
            pairs[name] = Pair(shares.combine(key_shares[name], everyone, roster.shares_needed))
    except ValueError:
        return False
    vector.mask(derive(seed, roster.digest, "own mask"), subtract=True)
    for name, pair in pairs.items():
        vector.mask(client.pair_key(pair, roster, victim), subtract=victim < name)
    return bool((vector.body == secret).all())


@pytest.mark.parametrize(("allies", "falls"), [(3, True), (2, False)])
def test_the_whole_attack_succeeds_where_the_bound_says_so(monkeypatch, allies, falls):
    """Of four neighbours and the site itself, four must give shares: three colluders among the neighbours are
    enough, if the fourth is said to be gone; two are not."""
    found, roster = begun(12, 4)
    bad = {"site-09", "site-10", "site-11"}
    draw, wanted = Roster.draw, (*sorted(bad)[:allies], *("site-01", "site-02")[: 4 - allies])

    def drawn(self, name):
        return tuple(sorted(wanted)) if name == VICTIM else draw(self, name)

    monkeypatch.setattr(Roster, "draw", drawn)
    assert roster.shares_needed == 4
    assert set_apart(found, roster, VICTIM, bad) is falls


@pytest.mark.parametrize("colluders", [3])
def test_where_all_are_neighbours_nobody_is_set_apart(colluders):
    """Ten sites, and as many colluders as the threshold bears."""
    found, roster = begun(10, 9)
    assert most_colluders(10, THRESHOLD) == colluders
    assert not set_apart(found, roster, VICTIM, set(found.names[-colluders:]))


# The bound, against draws ---------------------------------------------------------------------------------


def draws(size: int, neighbours: int) -> dict[str, set[str]]:
    """Whom each site draws: the same code as in a round."""
    _, roster = ROSTERS.setdefault((size, neighbours), begun(size, neighbours))
    return {name: {*roster.draw(name)} for name in roster.names}


ROSTERS: dict[tuple[int, int], tuple[Round, Roster]] = {}


@pytest.mark.parametrize(("size", "neighbours", "colluders"), [(10, 2, 2), *LATER])
def test_a_victim_is_set_apart_as_often_as_is_said(size, neighbours, colluders):
    """Tries until a given victim falls: their number is 1 / chance."""
    needed, times = least_needed(neighbours + 1, THRESHOLD), 60
    names = draws(size, neighbours)
    bad = set(list(names)[-colluders:])
    honest = [name for name in names if name not in bad]
    fallen = sum(
        len(drawn[name] & bad) >= needed - 1
        for drawn in (draws(size, neighbours) for _ in range(times))
        for name in honest
    )
    expected, trials = 2 ** chance(size, colluders, neighbours, THRESHOLD), times * len(honest)
    assert abs(fallen / trials - expected) < 4 * math.sqrt(expected / trials) + 1e-9


@pytest.mark.parametrize(("size", "neighbours", "colluders"), [(9, 3, 2), *LATER])
def test_groups_are_set_apart_no_more_often_than_is_said(size, neighbours, colluders):
    needed, times, found = least_needed(neighbours + 1, THRESHOLD), 150, 0
    for _ in range(times):
        drawn = draws(size, neighbours)
        bad = set(list(drawn)[-colluders:])
        honest = [name for name in drawn if name not in bad]
        found += any(
            all(len(drawn[one] & (bad | {*pair})) >= needed - 1 for one in pair)
            for pair in itertools.combinations(honest, 2)
        )
    bound = 2 ** chance_of_group(size, colluders, neighbours, THRESHOLD, 2)
    assert found / times <= bound + 4 * math.sqrt(bound / times)
    assert found  # else nothing was compared


def test_by_hand():
    """Ten sites with two neighbours, two colluders: one colluder among two of nine is enough, as the other
    may be said to be gone. 1 - (7 · 6) / (9 · 8) = 5 / 12."""
    assert 2 ** chance(10, 2, 2, THRESHOLD) == pytest.approx(5 / 12)
    assert chance(10, 3, 9, THRESHOLD) == -math.inf  # six of nine would have to collude
    assert chance_of_group(10, 2, 2, THRESHOLD) == 0.0  # eight victims: the bound says nothing


def test_the_default_bears_a_third_of_colluders():
    """Up to 161 sites all are neighbours, and no draw matters; above, more than 2^40 tries for any victim."""
    for size in (3, 10, 100, NEIGHBOURS + 1):
        colluders = most_colluders(size, THRESHOLD)
        assert chance_of_group(size, colluders, min(NEIGHBOURS, size - 1), THRESHOLD) == -math.inf
    for size in (200, 500, 1_000, 10_000, 100_000):
        colluders = most_colluders(size, THRESHOLD)
        assert colluders == -(-size // 3) - 1
        assert chance_of_group(size, colluders, NEIGHBOURS, THRESHOLD) < SAFE
    # The former default of 32, with neighbours that cannot be chosen: 2^12 tries.
    assert chance_of_group(100, 33, 32, THRESHOLD) == pytest.approx(-11.7, abs=0.1)


def test_other_thresholds_bear_what_they_say():
    for threshold in (0.5, 0.6, 0.7, 0.8, 1.0):
        for size in (200, 1_000, 10_000):
            colluders = most_colluders(size, threshold)
            assert chance_of_group(size, colluders, NEIGHBOURS, threshold) < SAFE


def test_noise_is_for_the_fewest_honest_sites_of_a_sum():
    """With all as neighbours: those who must stay, less the colluders. On a sparse graph fewer: a group that
    is almost as large can be set apart. With hardly any neighbours each site carries the whole noise."""
    assert least_honest(100, 33, 99, THRESHOLD, 67) == 34
    assert least_honest(200, 66, NEIGHBOURS, THRESHOLD, 134) == 65
    assert least_honest(100, 33, 4, THRESHOLD, 67) == 1


def test_a_victim_sees_that_its_neighbours_are_said_to_be_gone_and_in_the_sum():
    """A server hides a neighbour from the victim, so that they share no mask, and puts it into the sum."""
    found, roster = begun(5, 4)
    sent = {}
    for name in found.names:
        found.sessions[name], sent[name] = client.share(found.sessions[name], roster.text, TRUST, 2)
    there = [name for name in found.names if name not in (VICTIM, "site-01")]
    here = {other: sent[other][VICTIM] for other in there}
    with pytest.raises(ProtocolError, match="only 2 of its neighbours are there"):
        client.open_envelopes(found.sessions[VICTIM], here, there[:2])
    with pytest.raises(ProtocolError, match="site-00 is said to be there, and is no neighbour of its"):
        client.open_envelopes(found.sessions[VICTIM], here, [*there, VICTIM])
    with pytest.raises(ProtocolError, match="site-00 sent it shares, and is no other client"):
        client.open_envelopes(found.sessions[VICTIM], {VICTIM: b""}, there)
    session = client.mask(client.open_envelopes(found.sessions[VICTIM], here, there), Vector.zeros(1, 3))
    with pytest.raises(ProtocolError, match="site-01 is said to be in the sum, and was said to be gone"):
        client.confirm(session, found.names, found.identities[VICTIM], 2)
    with pytest.raises(ProtocolError, match="it shares a mask with nobody"):
        client.mask(replace(found.sessions[VICTIM], partners=()), Vector.zeros(1, 3))


def test_the_table_of_the_docs_is_what_is_computed():
    lines = (ROOT / "docs" / "secure-aggregation.md").read_text("utf-8").splitlines()
    wanted = [f"| {' | '.join(benchmark.cells(row))} |" for row in benchmark.rows()]
    assert [line for line in lines if line in wanted] == wanted
    stored = json.loads((ROOT / "benchmarks" / "results" / "mask_bounds.json").read_text("utf-8"))
    for row, old in zip(benchmark.rows(), stored["rows"], strict=True):
        new = {key: None if value == -math.inf else value for key, value in asdict(row).items()}
        assert new == pytest.approx(old)
