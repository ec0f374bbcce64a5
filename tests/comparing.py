"""Which parameters of two runs may differ, and by how much."""

import pytest

from fedfrozen_app.files import checkpoint


def is_key_bias(name):
    """Softmax ignores them, and Adam blows their rounding noise up."""
    return name.endswith(("k_proj.bias", "key.bias"))


def assert_alike(one, other):
    """Models, what clients keep, and figures of two runs, within 1e-9 of their size."""
    states = [{"": run.model} | checkpoint.newest(run.folder).clients for run in (one, other)]
    assert states[0].keys() == states[1].keys()
    for client, arrays in states[0].items():
        assert arrays.keys() == states[1][client].keys()
        for name, value in arrays.items():
            if not is_key_bias(name):
                apart = float((states[1][client][name] - value).norm())
                assert apart <= 1e-9 * max(1.0, float(value.norm())), (client, name)
    for row, twin in zip(one.rows[1:], other.rows[1:], strict=True):
        assert row["train_loss"] == pytest.approx(twin["train_loss"], rel=1e-9)
        assert row["bytes_up"] == twin["bytes_up"] and row["bytes_down"] == twin["bytes_down"]
    return states[0]
