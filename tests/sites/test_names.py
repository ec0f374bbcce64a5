"""A site that says hello under another's name, or as what it is not: it is set aside, and the run goes on."""

import json

import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.server.node_names import problem_of_name
from tests.conftest import slowly
from tests.sites.inprocess import SiteGrid

ROUND = ("num_rounds=1", "strategy.warmup_rounds=1")
NODES = {1: "north", 2: "south", 3: "west"}


def register(sites, folder="run"):
    """As `runtime=deployed` does when it submits the run: names of nodes, by their certificates' keys."""
    place = sites.folder / folder / "flower"
    place.mkdir(parents=True)
    (place / "sites.json").write_text(json.dumps(NODES))


def changing(node, first=False, **more):
    """A grid on which this node's hello has other values; `first`: it answers before the others."""

    class Grid(SiteGrid):
        def get_node_ids(self):
            found = list(super().get_node_ids())
            return sorted(found, key=lambda one: one != node) if first else found

        def run_client(self, message):
            answer = super().run_client(message)
            if message.metadata.message_type == MessageType.QUERY and message.metadata.dst_node_id == node:
                hello = json.loads(str(answer.content["hello"]["json"])) | more
                content = RecordDict({"hello": ConfigRecord({"json": json.dumps(hello)})})
                return Message(content, reply_to=message)
            return answer

    return Grid


def anchors(sites, folder="run"):
    """By site: the heads of its log that the server was told."""
    found: dict[str, set[str]] = {}
    for line in (sites.folder / folder / "anchors.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["site"], set()).add(entry["digest"])
    return found


def heads(sites, name):
    return {json.loads(line)["digest"] for line in sites.kit(name).audit.read_text().splitlines()}


def test_a_node_registered_as_west_cannot_say_hello_as_north(sites):
    """Before, the first to say north was north: the true one was locked out, and west's log became its."""
    register(sites)
    run = sites.train(*ROUND, "runtime.min_nodes=2", make_grid=changing(3, first=True, name="north"))
    assert run.rows[1]["clients"] == ["north", "south"] and run.rows[1]["clients_ok"] == 2
    assert set(anchors(sites)) == {"north", "south"}
    assert anchors(sites)["north"] <= heads(sites, "north")


def test_the_operator_learns_which_node_uses_another_name(sites):
    register(sites)
    with pytest.raises(UserError, match=r"The site west: it calls itself north, and is registered as west"):
        sites.train(*ROUND, make_grid=changing(3, name="north"))


@pytest.mark.parametrize("first", [True, *slowly(False)])
@pytest.mark.parametrize(
    "more", [{"num_partitions": 10**9}, *slowly({"num_partitions": 3}, {"partition": 1})]
)
def test_a_hello_with_fields_of_a_simulation_does_not_stop_the_run(sites, caplog, more, first):
    register(sites)
    run = sites.train(*ROUND, "runtime.min_nodes=2", make_grid=changing(2, first, **more))
    assert run.rows[1]["clients"] == ["north", "west"] and run.rows[1]["clients_ok"] == 2
    assert "which a site's hello does not have" in caplog.text


def test_without_a_list_of_nodes_the_kinds_still_do_not_mix(sites, caplog):
    """Plain `flwr run` has no list of registered names."""
    sites.runtime = "flower"
    run = sites.train(*ROUND, "++runtime.min_nodes=2", make_grid=changing(3, num_partitions=3))
    assert run.rows[1]["clients"] == ["north", "south"]
    assert "it says that it is a simulated node, and the run's other nodes are sites" in caplog.text


@pytest.mark.parametrize(
    ("node", "name", "reason"),
    [
        (1, "north", None),
        (1, "south", "it calls itself south, and is registered as north"),
        (1, "east", "it calls itself east, and is registered as north"),
        (9, "east", None),  # registered since
        (9, "west", "it calls itself west, and another node is registered as west"),
    ],
)
def test_a_name_belongs_to_one_node(node, name, reason):
    assert problem_of_name(node, name, NODES) == reason
    assert problem_of_name(node, name, {}) is None
