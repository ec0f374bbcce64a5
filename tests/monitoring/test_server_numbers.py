"""What a server shows of its runs: from the folders that the runs write."""

import json
import time
from types import SimpleNamespace

import pytest
from flwr.proto.node_pb2 import NodeInfo

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files.presence import Presence, SiteState, write_presence
from fedfrozen_app.monitoring import command
from fedfrozen_app.monitoring.endpoint import scrape
from fedfrozen_app.monitoring.families import SERVER, Collected
from fedfrozen_app.monitoring.run_numbers import RunNumbers
from fedfrozen_app.monitoring.server_source import ServerSource, run_of, silence_of
from tests.monitoring.kits import samples


def row(number, **more):
    usual = {"bytes_up": 100, "bytes_down": 300, "clients_ok": 3, "clients_failed": 0}
    seconds = {"train": 2.0, "aggregate": 0.5, "evaluate": 0.25, "total": 3.0}
    return {"round": number, "seconds": seconds, **usual, **more}


def write_rows(folder, rows, mode="a"):
    with (folder / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(one) + "\n" for one in rows)


def shown(run):
    found = Collected(SERVER)
    run.collect(found)
    return samples(scrape(SimpleNamespace(collect=lambda: found))[0].decode())


def test_rows_are_summed_once_each(tmp_path):
    run = RunNumbers("r", tmp_path, 8)
    write_rows(tmp_path, [{"round": 0}, row(1)])
    shown(run)
    write_rows(tmp_path, [row(2, clients_ok=2, clients_failed=1, failures=["x"], discarded="too few")])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "clie')  # being written
    found = shown(run)
    assert found['fedfrozen_run_round{run="r"}'] == 2 and found['fedfrozen_run_rounds{run="r"}'] == 8
    assert found['fedfrozen_run_seconds_total{phase="train",run="r"}'] == 4.0
    assert found['fedfrozen_run_bytes_total{run="r",way="down"}'] == 600
    assert found['fedfrozen_run_replies_total{run="r",state="taken"}'] == 5
    assert found['fedfrozen_run_last_replies{run="r",state="set aside"}'] == 1
    assert found['fedfrozen_run_discarded_rounds_total{run="r"}'] == 1


def test_a_run_that_went_back_to_a_checkpoint_is_read_again(tmp_path):
    run = RunNumbers("r", tmp_path, None)
    write_rows(tmp_path, [row(1), row(2), row(3)])
    shown(run)
    write_rows(tmp_path, [row(1)], mode="w")
    assert shown(run)['fedfrozen_run_bytes_total{run="r",way="up"}'] == 100


def test_states_of_sites_only_while_the_run_goes_on(tmp_path):
    write_rows(tmp_path, [row(1)])
    write_presence(tmp_path, Presence("t", 1, "", "", (SiteState("north", "late", "t"),)))
    run = RunNumbers("r", tmp_path, 8)
    assert shown(run)['fedfrozen_run_site{run="r",site="north",state="late"}'] == 1
    assert shown(run)['fedfrozen_run_site{run="r",site="north",state="there"}'] == 0
    run.going = False
    assert not [name for name in shown(run) if "run_site" in name or "last_replies" in name]


def value(text):
    return SimpleNamespace(string=text)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"output-dir": "/x", "overrides": "run_id=abc num_rounds=7 'dataset.path=a b'"}, "abc"),
        ({"output-dir": "/x", "overrides": ""}, "flower-5"),
        ({"output-dir": "/x", "census": "{}"}, None),
        ({}, None),
    ],
)
def test_what_flower_knows_of_a_run(settings, name):
    found = run_of(
        SimpleNamespace(run_id=5, override_config={key: value(text) for key, text in settings.items()})
    )
    assert (None if found is None else found.name) == name
    assert found is None or found.rounds == (7 if name == "abc" else None)


def test_silence_counts_from_the_last_heartbeat():
    """Flower notes until when a node counts as connected: two intervals after its last heartbeat."""
    node = NodeInfo(online_until=time.time() + 20, heartbeat_interval=30.0)
    assert silence_of(node) == pytest.approx(40, abs=2)
    assert silence_of(NodeInfo(heartbeat_interval=30.0)) is None


def test_a_server_that_is_down_says_so(tmp_path):
    (tmp_path / "server.yaml").touch()
    found = samples(scrape(ServerSource.of(tmp_path))[0].decode())
    assert found['fedfrozen_server_up{part="superlink"}'] == found['fedfrozen_server_up{part="proxy"}'] == 0


def test_another_folder_is_no_server_s_kit(tmp_path):
    with pytest.raises(UserError, match="no server's kit"):
        command.server_metrics([str(tmp_path)])
