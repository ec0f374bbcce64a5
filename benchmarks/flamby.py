"""FLamby's two hospital tables (Ogier du Terrail et al. 2022): our runs beside the published figures.

Design, written before the first run. Data: UCI Heart Disease of four hospitals, and TCGA-BRCA of six
regions, with FLamby's own splits (`prepare`). Settings: FLamby's published ones, as in
conf/experiment/flamby_*.yaml and `METHODS`. Outcome: accuracy (Heart) and Harrell's C-index (TCGA-BRCA) of
the last round on the pooled test rows. On Heart clients train on rows scaled by their own train rows, and
the pooled test rows are scaled by the pooled ones: that is what FLamby's pooled test does. Seeds give
weights and batch order. A method agrees if its mean lies within the published mean ± one standard
deviation. Differences to FedAvg are paired by seed, with a Student interval over all seeds. Every run
counts, and a run whose row is there is not repeated.

Lines were added after the first rows, when FLamby's code had been read beside ours. `scaffold_rows`:
its control variate c is the mean of the clients' weighted by their rows, where the paper's (`scaffold`) is
the plain mean. `fedadagrad` has FLamby's momentum of 0.9; the first rows, without, are
`fedadagrad_no_momentum`. `pooled` has FLamby's rate, 0.1 on TCGA-BRCA; `pooled_slow` is Adam's default of
0.001. `local_N` is one site alone, trained as `pooled` is. Rows of other methods are of earlier settings,
that were not FLamby's (`local`; `pooled_rounds`, whose moments were reset; `fedprox_half_mu`): no table
shows them.

Changed after the second reading of FLamby's code: seeds 42 to 51, whose first weights are those that FLamby's
script has for that seed (its published figures are of seeds 42 to 46), and on Heart one logit at FLamby's
own rates. Rows of seeds 0 to 9 are of before: first weights of another generator, on Heart two logits at
half the rates, which move their difference alike. Tables show seeds from 42.

    python benchmarks/flamby.py prepare heart|tcga_brca SOURCE FILE.csv
    python benchmarks/flamby.py run heart|tcga_brca FILE.csv [--seeds N] [--methods NAME ...]
    python benchmarks/flamby.py show
"""

import argparse
import csv
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from common import RESULTS
from flamby_report import Flamby
from provenance import require_commit

from fedfrozen_app.commands.api.own import overrides_for
from fedfrozen_app.config import compose_run
from fedfrozen_app.files.append import append
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process
from strategies.scaffold import Scaffold

FILE = RESULTS / "flamby.jsonl"
FIRST_SEED, SEEDS = 42, 10
METRIC = {"heart": "accuracy", "tcga_brca": "c_index"}
SITES = {  # in FLamby's order
    "heart": ("cleveland", "hungarian", "switzerland", "va"),
    "tcga_brca": ("Northeast", "South", "West", "Midwest", "Europe", "Canada"),
}


class ScaffoldByRows(Scaffold):
    """SCAFFOLD with FLamby's rule: c is the mean of the clients' control variates weighted by their rows."""

    equal = ()


def adaptive(name: str, rate: float, server_rate: float, *more: str) -> list[str]:
    return [
        f"server_optimizer={name}",
        f"client.lr={rate}",
        f"server_optimizer.lr={server_rate}",
        *more,
        "server_optimizer.tau=1e-8",
    ]


def central(rate: float, epochs: int) -> list[str]:
    """Adam on one client's rows, in one round, so that its moments are never reset."""
    found = ["num_rounds=1", f"client.local_epochs={epochs}", "client.local_steps=null"]
    found += ["client=adamw", f"client.lr={rate}", "client.weight_decay=0"]
    return [*found, "runtime.runner=sequential"]  # one client: nothing to stack, and a third of the time


POOLED = ("partition=iid", "num_clients=1", "~partition.column")
MOMENTS = ("server_optimizer.beta1=0.9", "server_optimizer.beta2=0.999")
METHODS: dict[str, dict[str, list[str]]] = {
    "heart": {
        "fedavg": ["strategy=fedavg"],
        "fedprox": ["strategy=fedprox", "strategy.mu=0.01"],
        "scaffold": ["strategy=scaffold"],
        "scaffold_rows": [],
        "fedadam": adaptive("adam", 0.01, 0.01, *MOMENTS),
        "fedyogi": adaptive("yogi", 0.003162, 0.01, *MOMENTS),
        "fedadagrad": adaptive("adagrad", 0.003162, 0.316228, MOMENTS[0]),
        "fedadagrad_no_momentum": adaptive("adagrad", 0.003162, 0.316228, "server_optimizer.beta1=0"),
        "pooled": [*central(1e-3, 50), *POOLED, "dataset.normalise=federation"],
    },
    "tcga_brca": {
        "fedavg": ["strategy=fedavg"],
        "fedprox": ["strategy=fedprox", "strategy.mu=0.1"],
        "scaffold": ["strategy=scaffold", "client.lr=0.01"],
        "scaffold_rows": ["client.lr=0.01"],
        "fedadam": adaptive("adam", 0.01, 0.1, *MOMENTS),
        "fedyogi": adaptive("yogi", 0.01, 0.1, *MOMENTS),
        "fedadagrad": adaptive("adagrad", 0.01, 1, MOMENTS[0]),
        "fedadagrad_no_momentum": adaptive("adagrad", 0.01, 1, "server_optimizer.beta1=0"),
        "pooled": [*central(0.1, 30), *POOLED],
        "pooled_slow": [*central(0.001, 30), *POOLED],
    },
}
LOCAL = {"heart": central(1e-3, 50), "tcga_brca": central(0.1, 30)}
for _dataset, _sites in SITES.items():
    for _number, _site in enumerate(_sites):
        _others = [str(client) for client, name in enumerate(sorted(_sites)) if name != _site]
        METHODS[_dataset][f"local_{_number}"] = [
            *LOCAL[_dataset],
            "exclude_clients=[" + ",".join(_others) + "]",
        ]
NO_INPUTS = ("site", "split", "disease", "E", "T")
INPUTS = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")


def prepare_heart(source: Path) -> pd.DataFrame:
    """As FLamby reads it: no slope, ca and thal, rows without a missing value, cp and restecg as 0 and 1."""
    from sklearn.model_selection import train_test_split

    parts = []
    for site in SITES["heart"]:
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
    words = [
        f"experiment=flamby_{dataset}",
        f"dataset.path={file}",
        f"seed={seed}",
        *METHODS[dataset][method],
    ]
    words += ["runtime.threads=1", "device=cpu", "track.tensorboard=false", "checkpoint.every=0"]
    words += ["baseline=false"]
    if method == "scaffold_rows":
        words += overrides_for("strategy", ScaffoldByRows)
    if method.startswith("pooled"):  # the partition no longer names the column that is no input
        inputs = [name for name in pd.read_csv(file, nrows=1).columns if name not in NO_INPUTS]
        words += ["dataset.columns=[" + ",".join(f"'{name}'" for name in inputs) + "]"]
    with tempfile.TemporaryDirectory() as folder:
        summary = run_in_process(Job(compose_run(words), Path(folder) / "run", None))
        rows = read_rows(Path(folder) / "run")
    value = rows[-1].get(f"test_{METRIC[dataset]}")
    found = {"dataset": dataset, "method": method, "seed": seed, "rounds": rows[-1]["round"]}
    return found | {"commit": commit, "value": value, "seconds": summary["seconds"]}


def measure(dataset: str, file: Path, seeds: int, methods: Sequence[str]) -> None:
    commit = require_commit()
    done = finished(dataset)
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for method in methods or METHODS[dataset]:
            if (method, seed) not in done:
                row = one_run(dataset, method, file.resolve(), seed, commit)
                append(FILE, json.dumps(row))
                print(json.dumps(row), flush=True)


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
        print(Flamby(RESULTS).tables())


if __name__ == "__main__":
    main()
