"""The order of replies: by time, of equal times by the clients' natural order."""

import itertools

from fedfrozen_app.clock.client_time import ClientTime
from fedfrozen_app.clock.event_queue import Assignment, EventQueue


def at_work(client, asked_at, seconds):
    return Assignment(client, 1, asked_at, ClientTime(0.0, 0.0, seconds, 0.0))


def test_replies_come_by_time_and_then_by_the_order_of_clients():
    found = [at_work("10", 0.0, 2.0), at_work("9", 1.0, 1.0), at_work("2", 0.5, 1.0), at_work("a", 0.0, 2.0)]
    for order in itertools.permutations(found):
        queue = EventQueue()
        for one in order:
            queue.add(one)
        assert queue.next_at == 1.5
        assert [queue.pop().client for _ in order] == ["2", "9", "10", "a"]
        assert queue.next_at == float("inf") and not queue
    assert EventQueue.of(found).pop().client == "2"
