"""Retinal vessels at two hospitals, DRIVE and CHASE_DB1: federated, pooled and alone.

Design, written before the first run. Sites: DRIVE's 20 train and 20 test pictures with the first observer's
masks, and CHASE_DB1's pictures of persons 1 to 10 (train) and 11 to 14 (test). Each picture is resized to 96
pixels a side; a U-Net of width 8 (conf/experiment/vessels.yaml). Size and rounds were chosen by time on one
core with seed 100, which is not counted. Every arm takes 30 passes over its train
rows: `federated` is FedAvg with one pass a round, `pooled` one client with all rows, `alone` each site by
itself. Outcome: Dice of the last round on each site's own test pictures, seeds 0 to 4. Differences to
`federated` are paired by seed, with a Student interval. Every run counts, and none is repeated.

    python benchmarks/vessels.py prepare SOURCE FOLDER    (SOURCE: the folders CHASEDB1 and DRIVE/datasets)
    python benchmarks/vessels.py run FOLDER [--seeds N]
    python benchmarks/vessels.py curves FOLDER            (after a look: why one federated run ends at 0.009)
    python benchmarks/vessels.py show
"""

import argparse
import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import RESULTS
from PIL import Image
from provenance import require_commit
from vessels_report import Vessels

from fedfrozen_app.config import compose_run
from fedfrozen_app.files.append import append
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

FILE, CURVES = RESULTS / "vessels.jsonl", RESULTS / "vessels_curves.jsonl"
SEEDS = 5
SITES = ("chase", "drive")
# Not of the design: the Dice of each round of seed 2, and of seed 0 beside it, as they were run and two ways
# in which the rate is not spent by round 30.
LOOKS = {
    "as run": (),
    "a constant rate": ("client.lr_schedule=constant",),
    "60 rounds": ("num_rounds=60",),
}
TRAIN_PERSONS = 10  # of CHASE_DB1
ARMS = {
    "federated": ["strategy=fedavg"],
    "pooled": ["strategy=fedavg", "partition=iid", "num_clients=1", "~partition.column"],
    "alone": ["strategy=local"],
}


def pairs(source: Path) -> Iterator[tuple[str, str, Path, Path]]:
    """Split, site, picture and mask."""
    for split, folder in (("train", "training"), ("test", "testing")):
        drive = source / "DRIVE" / "datasets" / folder
        for picture in sorted((drive / "images").glob("*.tif")):
            yield split, "drive", picture, drive / "1st_manual" / f"{picture.name[:2]}_manual1.gif"
    for picture in sorted((source / "CHASEDB1").glob("Image_*.jpg")):
        person = int(re.findall(r"\d+", picture.name)[0])
        split = "train" if person <= TRAIN_PERSONS else "test"
        yield split, "chase", picture, picture.with_name(f"{picture.stem}_1stHO.png")


def prepare(source: Path, folder: Path) -> None:
    """As fedfrozen reads them; a picture that is there twice ends it."""
    seen: dict[str, Path] = {}
    for split, site, picture, mask in pairs(source):
        place = folder / split / site
        for name in ("images", "masks"):
            (place / name).mkdir(parents=True, exist_ok=True)
        with Image.open(picture) as opened:
            pixels = opened.convert("RGB")
        digest = hashlib.sha256(pixels.tobytes()).hexdigest()
        if digest in seen:
            raise SystemExit(f"{picture} is the same picture as {seen[digest]}.")
        seen[digest] = picture
        pixels.save(place / "images" / f"{picture.stem}.png")
        with Image.open(mask) as opened:
            opened.convert("L").save(place / "masks" / f"{picture.stem}.png")
    print(f"{len(seen)} pictures, each once")


def stored() -> list[dict[str, Any]]:
    if not FILE.is_file():
        return []
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def one_run(arm: str, folder: Path, seed: int, commit: str) -> dict[str, Any]:
    words = ["experiment=vessels", f"dataset.path={folder}", f"seed={seed}", *ARMS[arm]]
    words += ["runtime.threads=1", "device=cpu", "track.tensorboard=false", "checkpoint.every=0"]
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        summary = run_in_process(Job(compose_run(words), run, None))
        rows = read_rows(run)
        found = {"arm": arm, "seed": seed, "rounds": rows[-1]["round"], "commit": commit}
        if arm == "alone":
            clients = json.loads((run / "personal.json").read_text(encoding="utf-8"))["clients"]
            own = {one["name"]: {"dice": one["personal"]} for one in clients}
        else:
            own = by_site(run)
    return found | {"sites": own, "seconds": summary["seconds"]}


def by_site(run: Path) -> dict[str, dict[str, float]]:
    """The final global model on each site's test pictures."""
    from fedfrozen_app.launch import load_run

    worker = load_run(run, [], trusted=True)
    columns = worker.corpus.test_columns["domain"]
    return {
        site: worker.task.evaluate(worker.data.test_table.take((columns == site).nonzero()[0]))
        for site in SITES
    }


def measure(folder: Path, seeds: int) -> None:
    commit = require_commit()
    done = {(row["arm"], row["seed"]) for row in stored()}
    for seed in range(seeds):
        for arm in ARMS:
            if (arm, seed) not in done:
                row = one_run(arm, folder.resolve(), seed, commit)
                append(FILE, json.dumps(row))
                print(json.dumps(row), flush=True)


def look(folder: Path) -> None:
    """The test Dice and loss of each round, on the test pictures of both sites."""
    commit = require_commit()
    for seed, way in ((0, "as run"), *((2, way) for way in LOOKS)):
        words = ["experiment=vessels", f"dataset.path={folder.resolve()}", f"seed={seed}", *LOOKS[way]]
        words += ["runtime.threads=1", "device=cpu", "track.tensorboard=false", "checkpoint.every=0"]
        with tempfile.TemporaryDirectory() as place:
            run = Path(place) / "run"
            run_in_process(Job(compose_run([*words, "eval_every=1"]), run, None))
            rows = read_rows(run)
        dice, loss = ([row[f"test_{name}"] for row in rows] for name in ("dice", "loss"))
        append(CURVES, json.dumps({"way": way, "seed": seed, "dice": dice, "loss": loss, "commit": commit}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepared = verbs.add_parser("prepare")
    prepared.add_argument("source", type=Path)
    prepared.add_argument("folder", type=Path)
    run = verbs.add_parser("run")
    run.add_argument("folder", type=Path)
    run.add_argument("--seeds", type=int, default=SEEDS)
    verbs.add_parser("curves").add_argument("folder", type=Path)
    verbs.add_parser("show")
    given = parser.parse_args()
    if given.verb == "prepare":
        prepare(given.source, given.folder)
    elif given.verb == "run":
        measure(given.folder, given.seeds)
    elif given.verb == "curves":
        look(given.folder)
    else:
        print(Vessels(RESULTS).table())


if __name__ == "__main__":
    main()
