"""Every file in conf/experiment/ says how it is run, and runs: its own command, with tiny limits."""

import io
import shlex

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from fedfrozen_app.config import compose_config
from fedfrozen_app.core.conf_files import conf_dir
from tests.conftest import worker_of
from tests.data.masked import draw

FILES = sorted((conf_dir() / "experiment").glob("*.yaml"))
TINY = {
    "num_rounds": 1,
    "dataset.limit": 240,
    "client.local_epochs": 1,
    "runtime.threads": 1,
}
TRANSFORMER = {
    "model.config.hidden_size": 12,
    "model.config.num_hidden_layers": 1,
    "model.config.num_attention_heads": 2,
    "model.config.intermediate_size": 12,
}
CONVOLUTIONS = {"client.local_steps": 1, "client.batch_size": 4}


def command_of(file):
    """The overrides of `# fedfrozen WORDS   (a remark)`, the file's first comment of its own."""
    package, first = file.read_text().splitlines()[:2]
    assert (
        package == "# @package _global_"
    )  # Hydra reads it at the top only, and else ignores the file's keys
    assert first.startswith("# fedfrozen ")
    return shlex.split(first.partition("(")[0])[2:]


@pytest.fixture
def pictures(tmp_path):
    """A folder like CIFAR-10's parquet: ten classes of 32x32 colour pictures."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 240), ("test", 20)):
        cells = []
        for _ in range(count):
            data = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(data, "PNG")
            cells.append({"bytes": data.getvalue(), "path": None})
        table = pa.table({"img": cells, "label": [row % 10 for row in range(count)]})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    return tmp_path


@pytest.fixture
def masks(tmp_path):
    """Two hospitals' pictures with masks."""
    return draw(tmp_path / "masked", sites=("chase", "drive"))


@pytest.fixture
def hospital_table(tmp_path):
    """A CSV file with the columns that FLamby's experiments name."""
    rng = np.random.default_rng(0)
    lines = ["age,sex,site,split,disease,T,E"]
    for row in range(120):
        site, split = ("cleveland", "hungary", "va")[row % 3], "test" if row % 5 == 0 else "train"
        age, event = rng.integers(30, 80), int(rng.random() < 0.5)
        lines.append(f"{age},{row % 2},{site},{split},{row % 4 // 2},{rng.integers(1, 900)},{event}")
    path = tmp_path / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("name", ["flamby_heart", "flamby_tcga_brca"])
def test_flamby_experiments_begin_at_flamby_s_weights(name, hospital_table):
    """Its script seeds torch and then makes one linear layer: two inputs here, and one output."""
    words = [f"experiment={name}", f"dataset.path={hospital_table}", "seed=43", "dataset.columns=[age,sex]"]
    model = worker_of(*words).model
    torch.manual_seed(43)
    layer = torch.nn.Linear(2, 1)
    assert torch.equal(model.classifier.weight, layer.weight)
    assert model.classifier.bias is None or torch.equal(model.classifier.bias, layer.bias)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_experiment_opens_with_its_command_and_runs(file, train, pictures, masks, hospital_table):
    words = command_of(file)
    assert words[0] == f"experiment={file.stem}"
    files = {
        "=DIR": f"={masks if file.stem == 'vessels' else pictures}",
        "=heart.csv": f"={hospital_table}",
        "=tcga_brca.csv": f"={hospital_table}",
    }
    for name, path in files.items():
        words = [word.replace(name, path) for word in words]
    layers = "hidden_size" in compose_config(words).model.config
    tiny = TINY | (TRANSFORMER if layers else CONVOLUTIONS)
    run = train(*words, *(f"{key}={value}" for key, value in tiny.items()), small=False)
    assert run.summary["status"] == "completed"
    assert run.rows[-1]["clients_failed"] == 0

    used = OmegaConf.create(run.summary["config"])
    asked = OmegaConf.to_container(OmegaConf.load(file))
    asked.pop("defaults")
    for key, value in leaves(asked):
        if key not in tiny:
            assert OmegaConf.select(used, key) == value, key


def leaves(node, prefix=""):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
