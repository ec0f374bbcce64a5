"""Masked cohorts under buffered pacing: who starts together and when a sum is in, worked out by hand."""

import json

import pytest

from fedfrozen_app.clock.client_time import ClientTime
from fedfrozen_app.clock.event_queue import Assignment
from fedfrozen_app.config import PacingConfig
from fedfrozen_app.server.make_pacer import make_pacer

FOUR = {"0": 1.0, "1": 4.0, "2": 2.0, "3": 3.0}


def paced(seconds, **settings):
    pacer = make_pacer(PacingConfig(name="buffered", **settings), seed=0, participation=1.0, masked=True)

    def run(number):
        """The cohorts that began, the clients whose sum came and how old it was, and of those dropped."""
        began = []

        def ask(clients, at):
            began.append((tuple(clients), at))
            return [Assignment(c, number, at, ClientTime(0.0, 0.0, seconds[c], 0.0)) for c in clients]

        closed = pacer.run_round(number, sorted(seconds), ask)
        used, dropped = (
            [(one.client, number - one.version) for one in part] for part in (closed.used, closed.dropped)
        )
        return began, used, dropped

    return pacer, run


def test_a_cohort_waits_for_its_slowest_client_and_for_no_other_cohort():
    pacer, run = paced(FOUR, concurrency=4, buffer=2)
    began, used, _ = run(1)
    (first, start), (second, start2) = began
    assert start == start2 == 0.0 and {*first, *second} == set("0123") and len(first) == len(second) == 2
    ends = {cohort: max(FOUR[client] for client in cohort) for cohort in (first, second)}
    quick, slow = sorted(ends, key=ends.get)
    assert [client for client, _ in used] == list(quick) and pacer.now == ends[quick]
    assert sorted(pacer.at_work) == sorted(slow)
    # The clients of the quick one start again together, from the next version.
    began, used, _ = run(2)
    assert began == [(quick, ends[quick])]
    again = 2 * ends[quick]
    expected = [(client, 0) for client in quick] if again < ends[slow] else [(client, 1) for client in slow]
    assert used == expected and pacer.now == min(again, ends[slow])


def test_no_client_is_in_two_cohorts_of_one_version():
    seconds = {str(number): 1.0 + number for number in range(9)}
    _, run = paced(seconds, concurrency=6, buffer=3, max_staleness=0)
    dropped = 0
    for number in range(1, 12):
        began, used, gone = run(number)
        asked = [client for cohort, _ in began for client in cohort]
        assert len(asked) == len(set(asked)) and len(used) == 3 and all(age == 0 for _, age in used)
        dropped += len(gone)
    assert dropped and dropped % 3 == 0, "a whole cohort is too old, or none of it"


def test_cohorts_that_end_at_one_instant_come_in_the_order_in_which_they_began():
    pacer, run = paced(dict.fromkeys("0123", 2.0), concurrency=4, buffer=2)
    (began, used, _), (_, later, _) = run(1), run(2)
    assert [client for client, _ in used] == list(began[0][0])
    assert [client for client, _ in later] == list(began[1][0]) and pacer.now == 2.0


def test_a_restored_pacer_goes_on_to_the_bit():
    seconds = {str(number): 0.1 + 0.7 * number for number in range(7)}
    pacer, run = paced(seconds, concurrency=4, buffer=2)
    for number in range(1, 4):
        run(number)
    state = json.loads(json.dumps(pacer.state_dict()))
    other, again = paced(seconds, concurrency=4, buffer=2)
    other.load_state_dict(state)
    assert pacer.at_work and pacer.cohorts
    for number in range(4, 10):
        assert run(number) == again(number) and pacer.now == other.now


def test_a_client_that_leaves_frees_its_whole_cohort():
    pacer, run = paced(FOUR, concurrency=4, buffer=2)
    run(1)
    (cohort,) = pacer.cohorts
    assert [one.client for one in pacer.remove(cohort[1])] == list(cohort)
    assert not pacer.at_work and not pacer.cohorts


@pytest.mark.parametrize(("places", "cohorts"), [(3, 1), (5, 2)])
def test_places_that_make_no_whole_cohort_stay_empty(places, cohorts):
    _, run = paced({str(n): 1.0 for n in range(5)}, concurrency=places, buffer=2)
    began, _, _ = run(1)
    assert len(began) == cohorts
