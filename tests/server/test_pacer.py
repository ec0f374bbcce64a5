"""Who is asked when, and which replies enter which step of the server: schedules worked out by hand."""

import json

import pytest

from fedfrozen_app.clock.client_time import ClientTime
from fedfrozen_app.clock.event_queue import Assignment
from fedfrozen_app.config import PacingConfig
from fedfrozen_app.server.make_pacer import make_pacer
from fedfrozen_app.server.sampling import draw_cohort

NAMES = ["0", "1", "2"]


def runner(pacer, seconds):
    """Runs a round whose clients take so many seconds each; returns what was asked, used and dropped."""

    def run(number, names=NAMES):
        def ask(clients, at):
            return [Assignment(c, number, at, ClientTime(0.0, 0.0, seconds[c], 0.0)) for c in clients]

        closed = pacer.run_round(number, names, ask)
        asked = [(one.client, one.asked_at) for one in closed.asked]
        return asked, *(
            [(one.client, number - one.version) for one in part] for part in (closed.used, closed.dropped)
        )

    return run


def buffered(seconds, **settings):
    pacer = make_pacer(PacingConfig(name="buffered", **settings), seed=0, participation=1.0)
    return pacer, runner(pacer, seconds)


def deadline(times, **settings):
    pacer = make_pacer(PacingConfig(name="deadline", **settings), seed=0, participation=1.0)
    return pacer, runner(pacer, times)


def test_two_clients_with_a_buffer_of_one():
    pacer, run = buffered({"0": 1.0, "1": 2.5}, concurrency=2, buffer=1)
    found = [(run(number, ["0", "1"]), pacer.now) for number in range(1, 6)]
    assert found == [
        (([("0", 0.0), ("1", 0.0)], [("0", 0)], []), 1.0),
        (([("0", 1.0)], [("0", 0)], []), 2.0),
        (([("0", 2.0)], [("1", 2)], []), 2.5),
        (([("1", 2.5)], [("0", 1)], []), 3.0),
        (([("0", 3.0)], [("0", 0)], []), 4.0),
    ]


def test_a_free_place_goes_to_somebody_else_within_a_version():
    """Two places for three clients: the third takes the place of the first to reply."""
    pacer, run = buffered({"0": 1.0, "1": 9.0, "2": 2.0}, concurrency=2, buffer=2)
    asked, used, _ = run(1)
    first = [client for client, at in asked if at == 0.0]
    (late,) = [(client, at) for client, at in asked if at > 0]
    quick = min(first, key={"0": 1.0, "1": 9.0, "2": 2.0}.get)
    assert len(first) == 2 and late[0] not in first and late[1] == {"0": 1.0, "1": 9.0, "2": 2.0}[quick]
    assert len(used) == 2 and len({client for client, _ in asked}) == 3
    assert len(pacer.at_work) == 1


def test_nobody_is_asked_twice_for_one_version():
    """With every client at work, a quick one waits for the next version."""
    pacer, run = buffered({"0": 1.0, "1": 5.0, "2": 7.0}, concurrency=3, buffer=2)
    assert run(1) == ([("0", 0.0), ("1", 0.0), ("2", 0.0)], [("0", 0), ("1", 0)], [])
    assert run(2) == ([("0", 5.0), ("1", 5.0)], [("0", 0), ("2", 1)], []) and pacer.now == 7.0


def test_equal_times_fill_the_buffer_in_the_order_of_clients():
    pacer, run = buffered(dict.fromkeys(NAMES, 2.0), concurrency=3, buffer=2)
    assert run(1) == ([("0", 0.0), ("1", 0.0), ("2", 0.0)], [("0", 0), ("1", 0)], [])
    # The third has replied at the same instant, and waits for the next step.
    assert run(2)[1:] == ([("2", 1), ("0", 0)], []) and pacer.now == 4.0


def test_a_reply_that_is_too_old_fills_no_place_in_the_buffer():
    pacer, run = buffered({"0": 1.0, "1": 2.5}, concurrency=2, buffer=1, max_staleness=1)
    assert [run(number, ["0", "1"])[1:] for number in (1, 2, 3, 4)] == [
        ([("0", 0)], []),
        ([("0", 0)], []),
        ([("0", 0)], [("1", 2)]),
        ([("0", 0)], []),
    ]
    assert pacer.now == 4.0


def test_the_first_draw_of_a_round_is_that_of_a_synchronous_one():
    names = [str(number) for number in range(20)]
    pacer, run = buffered(dict.fromkeys(names, 1.0), concurrency=6, buffer=6)
    for number in (1, 2, 3):
        asked, used, _ = run(number, names)
        assert [client for client, _ in asked] == draw_cohort(names, 0.3, 0, number)
        assert len(used) == 6 and pacer.now == number


def test_a_deadline_closes_the_round_and_late_replies_count_when_they_come():
    pacer, run = deadline({"0": 1.0, "1": 2.5, "2": 7.0}, seconds=2.0)
    assert run(1) == ([("0", 0.0), ("1", 0.0), ("2", 0.0)], [("0", 0)], []) and pacer.now == 2.0
    # The two at work are not asked; the round ends with the last of those that it asked.
    assert run(2) == ([("0", 2.0)], [("1", 1), ("0", 0)], []) and pacer.now == 3.0
    assert run(3)[1:] == ([("0", 0)], []) and pacer.now == 5.0
    assert run(4)[1:] == ([("1", 1), ("0", 0)], []) and pacer.now == 6.0


def test_a_share_of_replies_closes_the_round():
    pacer, run = deadline({"0": 1.0, "1": 2.5, "2": 2.5}, share=0.6)
    # Replies of one instant are all in.
    assert run(1)[1:] == ([("0", 0), ("1", 0), ("2", 0)], []) and pacer.now == 2.5
    pacer, run = deadline({"0": 1.0, "1": 2.5, "2": 2.6}, share=0.6)
    assert run(1)[1:] == ([("0", 0), ("1", 0)], []) and pacer.now == 2.5


def test_a_share_is_not_rounded_up_by_floating_point():
    names = [str(number) for number in range(25)]
    pacer, run = deadline({name: 1.0 + int(name) for name in names}, share=0.56)
    assert len(run(1, names)[1]) == 14 and pacer.now == 14.0


def test_dropped_replies_come_and_do_not_count():
    _, run = deadline({"0": 1.0, "1": 2.5, "2": 7.0}, seconds=2.0, late="drop")
    assert run(1)[1:] == ([("0", 0)], [])
    assert run(2)[1:] == ([("0", 0)], [("1", 1)])
    # A client that was late is asked again.
    assert run(3)[0] == [("0", 3.0), ("1", 3.0)]


def test_a_round_for_which_nobody_is_free_waits_for_the_next_reply():
    pacer, run = deadline({"0": 3.0, "1": 5.0}, seconds=1.0)
    assert run(1, ["0", "1"]) == ([("0", 0.0), ("1", 0.0)], [], []) and pacer.now == 1.0
    assert run(2, ["0", "1"]) == ([], [], []) and pacer.now == 2.0
    assert run(3, ["0", "1"]) == ([], [("0", 2)], []) and pacer.now == 3.0


@pytest.mark.parametrize("name", ["deadline", "buffered"])
def test_a_restored_pacer_goes_on_to_the_bit(name):
    seconds = {"0": 0.1, "1": 0.7, "2": 1.3}
    settings = {"seconds": 0.4} if name == "deadline" else {"concurrency": 2, "buffer": 1}
    pacer = make_pacer(PacingConfig(name=name, **settings), 0, 1.0)
    run = runner(pacer, seconds)
    for number in range(1, 5):
        run(number)
    state = json.loads(json.dumps(pacer.state_dict()))
    other = make_pacer(PacingConfig(name=name, **settings), 0, 1.0)
    other.load_state_dict(state)
    again = runner(other, seconds)
    assert pacer.at_work
    for number in range(5, 12):
        assert run(number) == again(number) and pacer.now == other.now
