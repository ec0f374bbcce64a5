"""The same run in Flower's simulation, where arrays travel as bytes and every worker builds its own base."""

import json

import pytest
import torch
from safetensors.torch import load_file

from fedfrozen_app import commands
from tests.conftest import SMALL

WORDS = ["strategy=fedavg", "adapter=lora", "adapter.rank=2", "track.tensorboard=false", "num_rounds=2"]
CASES = {
    "stack": ["adapter.rule=stack"],
    "ranks": ["+adapter.ranks.0=1"],
    "language": ["dataset=instructions", "dataset.max_tokens=24", "model.config.num_key_value_heads=1"],
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_flowers_simulation_gives_the_same_adapters_and_bytes(tmp_path, case):
    words = [*SMALL, *WORDS, *CASES[case]]
    if case == "language":
        rows_file = tmp_path / "rows.jsonl"
        lines = [json.dumps({"prompt": f"{n % 7}?", "answer": "so " * (n % 4 + 1)}) for n in range(60)]
        rows_file.write_text("\n".join(lines) + "\n")
        words.append(f"dataset.path={rows_file}")
    models, rows = {}, {}
    for runtime in ("inprocess", "flower"):
        folder = tmp_path / runtime
        assert commands.dispatch([*words, f"runtime={runtime}", f"output_dir={folder}"]) == 0
        models[runtime] = load_file(folder / "model.safetensors")
        rows[runtime] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert list(models["inprocess"]) == list(models["flower"])
    for name, value in models["inprocess"].items():
        torch.testing.assert_close(value, models["flower"][name], rtol=0, atol=1e-5)
    for row, twin in zip(rows["inprocess"], rows["flower"], strict=True):
        for key in ("bytes_up_by_role", "bytes_down_by_role"):
            assert row.get(key) == twin.get(key)
