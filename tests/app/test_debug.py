"""`debug=`: a quick try, no federation, the operation that makes a NaN, and where the time goes."""

import pytest
import torch
from PIL import Image

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.run.debugging import phases

SMALL = ("model.config.hidden_size=8", "model.config.intermediate_size=8", "model.config.num_hidden_layers=1")


def config(*words):
    return read(resolved(compose_config(list(words))))


def test_the_files_say_what_they_promise():
    fast, alone, nan = config("debug=fast"), config("debug=one_client"), config("debug=nan")
    assert (fast.num_rounds, fast.num_clients, fast.dataset.limit) == (2, 4, 200)
    assert (alone.num_clients, alone.partition.name) == (1, "iid")
    assert nan.debug.nan and nan.runtime.runner == "sequential"
    assert config("debug=fast", "num_rounds=5").num_rounds == 5


@pytest.mark.pictures
def test_a_profile_is_a_picture_and_a_table(train):
    run = train(*SMALL, "debug=fast", "debug.profile=true")
    with Image.open(run.folder / "profile.png") as picture:
        assert picture.size[0] > 800
    table = (run.folder / "profile.txt").read_text()
    assert ("function calls" in table and "sequential.py" in table) or "cohort.py" in table


def test_phases_leave_the_first_round_out_and_name_the_rest():
    rows = [{"round": 0}]
    rows += [
        {"round": n, "seconds": {"train": s, "total": s + 1}} for n, s in ((1, 90.0), (2, 2.0), (3, 4.0))
    ]
    assert phases(rows) == {"train": 3.0, "other": 1.0}
    assert phases(rows[:2]) == {"train": 90.0, "other": 1.0}
    assert phases([]) == {}


def test_a_nan_is_named_where_it_is_made(train, capfd):
    with pytest.raises(Exception, match="nan values"):
        train(*SMALL, "debug=nan", "num_rounds=1", "num_clients=2", "dataset.limit=60", "client.lr=1e30")
    assert not torch.is_anomaly_enabled()
