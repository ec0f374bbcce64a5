"""A census over Flower's own processes: three real sites with TLS and node keys, and Flower's simulation.

`pytest -m slow tests/sites/test_census_deployed.py`
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.sites.audit_log import check_anchors, read_audit
from fedfrozen_app.sites.kit import Kit
from tests.sites.federation import SITES, federation
from tests.sites.twin import join

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
SECRET = "the-name-of-a-patient"


def test_three_sites_with_tls_of_which_one_refuses(tmp_path):
    out = tmp_path / "out"
    with federation(tmp_path / "fed") as deployment:
        join(deployment, SITES, network=False)
        deployment.change("west", "policy.yaml", census=False)
        for site in SITES:  # a picture whose file says whose it is
            folder = deployment.kits / site / "data" / "0"
            shutil.copy(next(folder.glob("*.png")), folder / f"{SECRET}.png")
        words = ["runtime=deployed", f"runtime.server_kit={deployment.kits}/operator", "runtime.min_nodes=3"]
        assert command(["census", *words, f"output_dir={out}"]) == 0
        found = json.loads((out / "census.json").read_text())
        assert set(found["sites"]) == {"north", "south"}
        assert list(found["refused"]) == ["west"] and found["advice"][0]["site"] == "west"
        for site in ("north", "south"):
            told, kit = found["sites"][site], Kit.read(deployment.kits / site)
            check_against_the_pictures(told, deployment.kits / site / "data")
            (entry,) = read_audit(kit.audit)
            assert entry["event"] == "census" and entry["proposal"] == found["asked"]["hash"]
            # What the server has is, to the byte, what the site wrote down that it sent.
            text = canonical(told)
            assert entry["answer"] == hashlib.sha256(text.encode()).hexdigest()
            assert entry["bytes"] == len(text.encode())
            assert check_anchors(kit.audit, site, out / "anchors.jsonl") == 1
        (entry,) = read_audit(Kit.read(deployment.kits / "west").audit)
        assert (entry["event"], entry["reason"]) == ("refused", "it takes part in no census")
    assert found_in([out, deployment.kits / "server", deployment.kits / "operator"], SECRET.encode()) == []
    picture = next((deployment.kits / "north" / "data").rglob("*.png")).read_bytes()
    assert found_in([out, deployment.kits / "server"], picture[40:80]) == []


def check_against_the_pictures(told: dict, folder: Path) -> None:
    paths = sorted(folder.rglob("*.png"))
    assert told["rows"] == told["people"] == len(paths)
    means = np.array([np.asarray(Image.open(path)).mean() for path in paths])
    assert told["moments"]["brightness"]["mean"] == pytest.approx(means.mean())
    assert told["moments"]["brightness"]["variance"] == pytest.approx(means.var())
    table = told["tables"]["classes"]
    counts = {label: len(list((folder / label).glob("*.png"))) for label in map(str, range(10))}
    assert table["total"] == len(paths)
    for label, rows in table["rows"].items():
        assert rows == counts.get(label, 0)
        assert rows == 0 or rows >= told["floor"]
    for label in table["hidden"]:
        assert label == "(none)" or counts[label] > 0


def found_in(folders: list[Path], needle: bytes) -> list[Path]:
    """The files below these folders that hold it."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if needle in path.read_bytes()]


def test_flowers_simulation_counts_what_one_process_counts(tmp_path):
    settings = ["num_clients=3", "dataset.limit=300", "--floor", "3"]
    for runtime in ("inprocess", "flower"):
        words = ["census", "++run_id=the-same", f"runtime={runtime}", f"output_dir={tmp_path / runtime}"]
        assert command([*words, *settings]) == 0
    one, other = (
        json.loads((tmp_path / runtime / "census.json").read_text()) for runtime in ("inprocess", "flower")
    )
    assert canonical(one["sites"]) == canonical(other["sites"])
    assert one["distances"] == other["distances"] and one["advice"] == other["advice"]
