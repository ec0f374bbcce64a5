"""Cohorts, names and the ledger of clients that nobody lists."""

from fedfrozen_app.exchange import ledger as ledgers
from fedfrozen_app.exchange.ledger import Ledger
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.server.local_nodes import LocalNodes
from fedfrozen_app.server.membership import Membership
from fedfrozen_app.server.sampling import draw_cohort, participations
from fedfrozen_app.server.transport import Transport


def test_the_cohort_of_numbered_clients_is_that_of_their_list():
    for count, share in ((7, 0.5), (30, 0.1), (5000, 0.02), (20_001, 0.01)):
        for excluded in (frozenset(), frozenset({"0", "4"})):
            nodes = LocalNodes(count, excluded)
            listed = [str(number) for number in range(count) if str(number) not in excluded]
            assert draw_cohort(nodes, share, 3, 2) == draw_cohort(listed, share, 3, 2)
    assert draw_cohort(LocalNodes(4), 1.0, 0, 1) == ["0", "1", "2", "3"]


def test_a_cohort_of_a_million_is_drawn_without_their_names(monkeypatch):
    def listed(self):
        raise AssertionError("all clients were listed")

    monkeypatch.setattr(LocalNodes, "__iter__", listed)
    nodes = LocalNodes(1_000_000)
    cohort = draw_cohort(nodes, 0.001, 0, 1)
    assert len(set(cohort)) == 1000 and cohort == sorted(cohort, key=int)
    assert nodes[cohort[0]] == int(cohort[0]) + 1 and "1000000" not in nodes


def test_participations_of_many_are_those_of_a_list_without_the_zeros():
    nodes, listed = LocalNodes(50), tuple(map(str, range(50)))
    all_of_them = participations(listed, 0.1, 1, 4)
    assert sum(all_of_them.values()) == 20 and len(all_of_them) == 50
    assert participations(nodes.names, 0.1, 1, 4) == {c: times for c, times in all_of_them.items() if times}


def test_very_many_nodes_of_a_process_are_not_greeted():
    asked = []
    grid = InProcessGrid(lambda message, context: asked.append(message), 2000, {})
    membership = Membership(Transport(grid, local=True), excluded=frozenset({"5"}))
    names = membership.present()
    assert not asked and len(names) == 1999 and "5" not in names and names["7"] == 8
    assert membership.num_partitions() == {2000} and not membership.of_sites
    assert not grid.contexts.made()


def test_a_ledger_of_many_clients_is_read_back(monkeypatch):
    monkeypatch.setattr(ledgers, "LISTED", 3)
    ledger, again = Ledger(), Ledger()
    for client in range(6):
        ledger.confirm(str(client), ["b", "a"] if client % 2 else ["c"])
    state = ledger.state_dict()
    assert list(state.values()) == [[[["c"], ["0", "2", "4"]], [["a", "b"], ["1", "3", "5"]]]]
    again.load_state_dict(state)
    assert [again.held(str(client)) for client in range(7)] == [ledger.held(str(c)) for c in range(7)]
    assert again.missing("1", {"x": "a", "y": "c"}) == ["y"] and again.is_cold("1")
