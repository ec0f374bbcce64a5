"""The same run under both runners, compared."""

from tests.comparing import is_key_bias

THREE_ROUNDS = ["num_rounds=3", "checkpoint.keep=9"]  # FedFrozen's default freezes after the first


def compare(one, other, tolerance, per_tensor):
    """Movements of both runs in every round, within `tolerance` of each tensor's or of the whole."""
    for server_round in (2, 3):
        before = one.model_after(server_round - 1)
        apart, moved = {}, {}
        for name, value in one.model_after(server_round).items():
            difference = value.double() - other.model_after(server_round)[name].double()
            apart[name] = difference.norm().item()
            moved[name] = (value.double() - before[name].double()).norm().item()
        biases = [name for name in apart if is_key_bias(name)]
        if per_tensor:
            # Softmax ignores key biases: their true movement is zero, so only its size can be compared.
            assert all(apart[name] <= 1e-9 for name in biases)
            for name in apart:
                # A frozen tensor does not move, but carries what the warm-up's rounding left.
                assert is_key_bias(name) or apart[name] <= tolerance * max(moved[name], before[name].norm())
        else:
            whole = sum(value**2 for name, value in moved.items() if name not in biases) ** 0.5
            error = sum(value**2 for name, value in apart.items() if name not in biases) ** 0.5
            assert error <= tolerance * whole
    for row, twin in zip(one.rows, other.rows, strict=True):
        for key in ("bytes_up", "bytes_down", "bytes_up_by_role", "clients", "stage", "trained_params"):
            assert row.get(key) == twin.get(key), key


def no_dropout(config):
    """Dropout draws differ between the runners."""
    return type(config)(**{k: 0.0 if "drop" in k and v else v for k, v in config.to_dict().items()})


RUNNERS = ("sequential", "cohort")
