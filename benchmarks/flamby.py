"""FLamby's two hospital tables (Ogier du Terrail et al. 2022): our runs beside the published figures.

Design, written before the first run. Data: UCI Heart Disease of four hospitals, and TCGA-BRCA of six
regions, with FLamby's own splits (`prepare`). Settings: FLamby's published ones, as in
conf/experiment/flamby_*.yaml and `METHODS`. Outcome: accuracy (Heart) and Harrell's C-index (TCGA-BRCA) of
the last round on the pooled test rows. On Heart clients train on rows scaled by their own train rows, and
the pooled test rows are scaled by the pooled ones: that is what FLamby's pooled test does. Seeds 0 to 9 give
weights and batch order. A method agrees if its mean lies within the published mean ± one standard
deviation. Differences to FedAvg are paired by seed, with a Student interval over all seeds. Every run
counts, and a run whose row is there is not repeated.

    python benchmarks/flamby.py prepare heart|tcga_brca SOURCE FILE.csv
    python benchmarks/flamby.py run heart|tcga_brca FILE.csv [--seeds N] [--methods NAME ...]
    python benchmarks/flamby.py show
"""

import argparse
import csv
import json
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from common import RESULTS
from provenance import require_commit
from scipy.stats import t as student

from fedfrozen_app.config import compose_run
from fedfrozen_app.files.append import append
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

FILE = RESULTS / "flamby.jsonl"
SEEDS = 10
METRIC = {"heart": "accuracy", "tcga_brca": "c_index"}
# FLamby's own figures: mean and standard deviation over seeds 42 to 46.
PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    "heart": {
        **dict.fromkeys(("fedavg", "fedprox", "scaffold"), (0.748, 0.027)),
        **dict.fromkeys(("fedadam", "fedyogi", "fedadagrad"), (0.779, 0.015)),
        "pooled": (0.795, 0.003),
    },
    "tcga_brca": {
        "fedavg": (0.735, 0.175),
        "fedprox": (0.717, 0.162),
        "scaffold": (0.699, 0.035),
        "fedadam": (0.842, 0.017),
        "fedyogi": (0.842, 0.017),
        "fedadagrad": (0.834, 0.007),
        "pooled": (0.704, 0.114),
    },
}
ADAM = ["server_optimizer.tau=1e-8", "server_optimizer.beta1=0.9"]
SECOND = "server_optimizer.beta2=0.999"
# On Heart two logits stand for FLamby's one, and rates are half of its.
METHODS: dict[str, dict[str, list[str]]] = {
    "heart": {
        "fedavg": ["strategy=fedavg"],
        "fedprox": ["strategy=fedprox", "strategy.mu=0.01"],
        "scaffold": ["strategy=scaffold"],
        "fedadam": ["server_optimizer=adam", "client.lr=0.005", "server_optimizer.lr=0.005", SECOND, *ADAM],
        "fedyogi": [
            "server_optimizer=yogi",
            "client.lr=0.001581",
            "server_optimizer.lr=0.005",
            SECOND,
            *ADAM,
        ],
        "fedadagrad": [
            *("server_optimizer=adagrad", "client.lr=0.001581", "server_optimizer.lr=0.158114"),
            *("server_optimizer.tau=1e-8", "server_optimizer.beta1=0"),
        ],
        "local": ["strategy=local", "personal=true"],
        "pooled": [
            *("partition=iid", "num_clients=1", "num_rounds=50", "client=adamw"),
            *("client.lr=5e-4", "client.weight_decay=0", "client.local_epochs=1", "client.local_steps=null"),
            "dataset.normalise=federation",
        ],
    },
    "tcga_brca": {
        "fedavg": ["strategy=fedavg"],
        "fedprox": ["strategy=fedprox", "strategy.mu=0.1"],
        "scaffold": ["strategy=scaffold", "client.lr=0.01"],
        "fedadam": ["server_optimizer=adam", "client.lr=0.01", "server_optimizer.lr=0.1", SECOND, *ADAM],
        "fedyogi": ["server_optimizer=yogi", "client.lr=0.01", "server_optimizer.lr=0.1", SECOND, *ADAM],
        "fedadagrad": [
            *("server_optimizer=adagrad", "client.lr=0.01", "server_optimizer.lr=1"),
            *("server_optimizer.tau=1e-8", "server_optimizer.beta1=0"),
        ],
        "local": ["strategy=local", "personal=true"],
        "pooled": [
            *("partition=iid", "num_clients=1", "num_rounds=30", "client=adamw"),
            *("client.lr=0.001", "client.weight_decay=0", "client.local_epochs=1", "client.local_steps=null"),
        ],
    },
}
NO_INPUTS = ("site", "split", "disease", "E", "T")
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
INPUTS = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")


def prepare_heart(source: Path) -> pd.DataFrame:
    """As FLamby reads it: no slope, ca and thal, rows without a missing value, cp and restecg as 0 and 1."""
    from sklearn.model_selection import train_test_split

    parts = []
    for site in HOSPITALS:
        rows = pd.read_csv(source / f"processed.{site}.data", header=0, na_values="?", skipinitialspace=True)
        rows.columns = [*INPUTS, "slope", "ca", "thal", "num"]
        rows = rows.drop(columns=["slope", "ca", "thal"]).dropna().reset_index(drop=True)
        parts.append(rows.assign(site=site, disease=(rows.pop("num") > 0).astype(int)))
    whole = pd.concat(parts, ignore_index=True)
    for column in ("cp", "restecg"):
        for level in sorted(whole[column].unique())[1:]:
            whole[f"{column}_{level:g}"] = (whole[column] == level).astype(int)
    whole = whole.drop(columns=["cp", "restecg"])
    whole["split"] = "test"
    for _, rows in whole.groupby("site", sort=False):
        enough = rows["disease"].value_counts().min() > 2 and rows["disease"].nunique() == 2
        train, _ = train_test_split(
            rows.index, train_size=0.66, random_state=43, stratify=rows["disease"] if enough else None
        )
        whole.loc[train, "split"] = "train"
    return whole


def prepare_tcga_brca(source: Path) -> pd.DataFrame:
    """The patients of FLamby's split, by region."""
    rows = pd.read_csv(source / "brca.csv")
    with (source / "centers.csv").open(encoding="utf-8") as file:
        region = {row["TSS Code"]: row["Region"] for row in csv.DictReader(file, skipinitialspace=True)}
    split = pd.read_csv(source / "train_test_split.csv").set_index("pid")["fold"]
    rows = rows[rows["pid"].isin(split.index)]
    sites = [region.get(name.split("-")[1], "") for name in rows["pid"]]
    rows = rows.assign(site=sites, split=[split[name] for name in rows["pid"]], E=rows["E"].astype(int))
    return rows.drop(columns="pid")


def finished(dataset: str) -> set[tuple[str, int]]:
    return {(row["method"], row["seed"]) for row in stored() if row["dataset"] == dataset}


def stored() -> list[dict[str, Any]]:
    if not FILE.is_file():
        return []
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def one_run(dataset: str, method: str, file: Path, seed: int, commit: str) -> dict[str, Any]:
    own = METHODS[dataset][method]
    words = [f"experiment=flamby_{dataset}", f"dataset.path={file}", f"seed={seed}", *own]
    if method == "pooled":  # the partition no longer names the column that is no input
        inputs = [name for name in pd.read_csv(file, nrows=1).columns if name not in NO_INPUTS]
        words += ["~partition.column", "dataset.columns=[" + ",".join(f"'{name}'" for name in inputs) + "]"]
    words += ["runtime.threads=1", "device=cpu", "track.tensorboard=false", "checkpoint.every=0"]
    with tempfile.TemporaryDirectory() as folder:
        summary = run_in_process(Job(compose_run(words), Path(folder) / "run", None))
        rows = read_rows(Path(folder) / "run")
    key = f"test_{METRIC[dataset]}"
    found = {
        "dataset": dataset,
        "method": method,
        "seed": seed,
        "rounds": rows[-1]["round"],
        "commit": commit,
    }
    own_sites = (summary.get("personal") or {}).get("global" if method != "local" else "personal") or {}
    return found | {"value": rows[-1].get(key), "sites": own_sites.get("mean"), "seconds": summary["seconds"]}


def measure(dataset: str, file: Path, seeds: int, methods: Sequence[str]) -> None:
    commit = require_commit()
    done = finished(dataset)
    for seed in range(seeds):
        for method in methods or METHODS[dataset]:
            if (method, seed) not in done:
                row = one_run(dataset, method, file.resolve(), seed, commit)
                append(FILE, json.dumps(row))
                print(json.dumps(row), flush=True)


def table(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """By data set and method: our mean and deviation, the published ones, and the paired difference to
    FedAvg."""
    for dataset, methods in METHODS.items():
        by = {
            name: {r["seed"]: r["value"] for r in rows if (r["dataset"], r["method"]) == (dataset, name)}
            for name in methods
        }
        for name, values in by.items():
            if not values or None in values.values():
                continue
            mean = statistics.fmean(values.values())
            deviation = statistics.stdev(values.values()) if len(values) > 1 else math.nan
            known = PUBLISHED[dataset].get(name)
            inside = "" if known is None else "yes" if abs(mean - known[0]) <= known[1] else "no"
            pairs = [values[seed] - by["fedavg"][seed] for seed in values if seed in by["fedavg"]]
            yield (
                dataset,
                name,
                str(len(values)),
                f"{mean:.3f} ± {deviation:.3f}",
                "" if known is None else f"{known[0]:.3f} ± {known[1]:.3f}",
                inside,
                interval(pairs),
            )


def interval(pairs: Sequence[float]) -> str:
    if len(pairs) < 2:
        return ""
    mean = statistics.fmean(pairs)
    half = student.ppf(0.975, len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepared = verbs.add_parser("prepare")
    prepared.add_argument("dataset", choices=METHODS)
    prepared.add_argument("source", type=Path)
    prepared.add_argument("file", type=Path)
    run = verbs.add_parser("run")
    run.add_argument("dataset", choices=METHODS)
    run.add_argument("file", type=Path)
    run.add_argument("--seeds", type=int, default=SEEDS)
    run.add_argument("--methods", nargs="*", default=[])
    verbs.add_parser("show")
    given = parser.parse_args()
    if given.verb == "prepare":
        make = {"heart": prepare_heart, "tcga_brca": prepare_tcga_brca}[given.dataset]
        found = make(given.source)
        found.to_csv(given.file, index=False)
        print(found.groupby(["site", "split"], sort=False).size().to_string())
    elif given.verb == "run":
        measure(given.dataset, given.file, given.seeds, given.methods)
    else:
        for line in table(stored()):
            print(" | ".join(line))


if __name__ == "__main__":
    main()
