"""Virtual time: profiles, the time of one request by hand, and operations counted for known models."""

from pathlib import Path
from statistics import median

import pytest

from fedfrozen_app.clock.client_time import Work, time_of
from fedfrozen_app.clock.profiles import Profile, draw_profile, make_profile, read_profiles
from fedfrozen_app.config import ClockConfig
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.run.step_operations import operations_per_row
from tests.conftest import worker_of

HOUR = 3600.0


def test_a_request_s_time_by_hand():
    profile = Profile(speed=2.0, uplink=8.0, downlink=80.0)
    found = time_of(profile, Work(bytes_down=5_000_000, operations=6e9, bytes_up=3_000_000), 0.0, HOUR)
    assert (found.wait, found.download, found.train, found.upload) == (0.0, 0.5, 3.0, 3.0)
    assert found.total == 6.5


@pytest.mark.parametrize(
    ("now", "start"),
    [(0.0, 600.0), (599.0, 600.0), (600.0, 600.0), (2399.0, 2399.0), (2400.0, 4200.0), (4300.0, 4300.0)],
)
def test_a_client_starts_in_its_hours(now, start):
    """There from 600 to 2400 s of every hour."""
    profile = Profile(1.0, 1.0, 1.0, availability=0.5, opens=600.0)
    assert profile.next_start(now, HOUR) == start


def test_profiles_depend_on_seed_and_name_alone():
    config = ClockConfig(spread=1.0)
    one, again, other = (draw_profile(config, *given) for given in ((0, "7"), (0, "7"), (1, "7")))
    assert one == again and one != other
    speeds = [draw_profile(config, 0, str(client)).speed for client in range(2000)]
    assert 0.93 < median(speeds) / config.speed < 1.07
    inside = sum(config.speed / 2.71828 < speed < config.speed * 2.71828 for speed in speeds) / len(speeds)
    assert 0.65 < inside < 0.72  # one deviation of the logarithm
    even = ClockConfig(distribution="uniform", spread=0.3)
    assert all(35 <= draw_profile(even, 0, str(client)).speed <= 65 for client in range(200))
    assert draw_profile(ClockConfig(distribution="equal"), 3, "x").uplink == 10.0


def test_a_file_s_values_replace_drawn_ones(tmp_path):
    path = tmp_path / "links.csv"
    path.write_text("client,uplink,availability\n3,1.5,\nnorth,2,0.25\n")
    config = ClockConfig(distribution="equal")
    known = read_profiles(path)
    assert make_profile(config, 0, "3", known).uplink == 1.5
    assert make_profile(config, 0, "3", known).availability == 1.0
    assert make_profile(config, 0, "north", known).availability == 0.25
    assert make_profile(config, 0, "4", known).uplink == 10.0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name,uplink\n1,2\n", "has no column client: use client and any of speed"),
        ("client,upload\n1,2\n", "has a column upload: use client and any of speed"),
        ("client,uplink\n1,fast\n", "line 2: uplink is fast, and must be a positive number"),
        ("client,uplink\n1,-2\n", "line 2: uplink is -2, and must be a positive number"),
        ("client,uplink\n1,nan\n", "line 2: uplink is nan, and must be a positive number"),
        ("client,uplink\n1,2\n1,3\n", "line 3 names client 1 again: correct it"),
        ("client,uplink\n1\n", "line 2 has not one value per column: correct it"),
        ("client,availability\n1,2\n", "availability is 2, and is a share of the time: give at most 1"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, text, sentence):
    path = tmp_path / "links.csv"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_profiles(path)
    assert sentence in str(error.value)


def test_operations_of_a_linear_model_by_hand(tmp_path):
    """64 pixels, 10 classes: forward 2·64·10, and as many for the weights' gradient."""
    lines = ["a,b,c,y", *(f"{n},{n % 7},{n % 3},{n % 2}" for n in range(60))]
    path = Path(tmp_path) / "table.csv"
    path.write_text("\n".join(lines))
    data = ["dataset=table", f"dataset.path={path}", "dataset.label_column=y", "model=linear"]
    worker = worker_of(*data, "strategy=fedavg", "partition=iid", "num_clients=2")
    inputs, outputs = worker.model.get_parameter(next(n for n in worker.parameters if "weight" in n)).shape[
        ::-1
    ]
    assert operations_per_row(worker, set(worker.parameters)) == 2 * 2 * inputs * outputs
    assert operations_per_row(worker, set()) == 2 * inputs * outputs


def test_a_frozen_kernel_costs_less_and_no_generator_moves():
    import torch

    worker = worker_of("strategy=fedavg", "model=vit_mini", "dataset.limit=60", "num_clients=2", "device=cpu")
    state = torch.get_rng_state()
    everything = set(worker.parameters)
    kernel = {name for name in everything if worker.roles[name].kind in ("query", "key")}
    whole, frozen = operations_per_row(worker, everything), operations_per_row(worker, everything - kernel)
    hidden = worker.config.model.config["hidden_size"]
    layers = worker.config.model.config["num_hidden_layers"]
    tokens = (8 // worker.config.model.config["patch_size"]) ** 2 + 1
    assert (
        whole - frozen == layers * 2 * 2 * tokens * hidden * hidden
    )  # the gradients of two matrices a layer
    assert torch.equal(torch.get_rng_state(), state)
    assert all(value.requires_grad for value in worker.parameters.values())
