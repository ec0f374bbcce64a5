"""pFedDC and its baselines on PACS, with a dual encoder of DINOv2-small and MiniLM (it is not CLIP).

    python benchmarks/pfeddc.py --vision DIR --text DIR --data DIR   (the encoders' folders, and PACS)
    python benchmarks/pfeddc.py --carry DIR                          (as benchmarks/pfeddc_pack.py packs them)

First `fedfrozen align` on a fifth of PACS that no run trains or tests on, then the fusion's learning rate by
the clients' validation rows, then every cell of the tables. A cell is kept as soon as it is done, in
benchmarks/results/pfeddc.json (--out): started again, the script goes on where it stopped. --minutes bounds
a call.
"""

import argparse
import contextlib
import io
import itertools
import json
import logging
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import RESULTS, machine, write_result
from pfeddc_pack import unpack_encoder
from scipy import stats

from fedfrozen_app.align.command import make
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus
from fedfrozen_app.runtime.inprocess import run_in_process

ALIGN = 0.2
SPLITS = {  # name: (words, clients)
    "domain": (["partition=domain"], 4),
    "domain x3": (["partition=domain", "partition.clients_per_domain=3"], 12),
    "domain x5": (["partition=domain", "partition.clients_per_domain=5"], 20),
    "domain x12": (["partition=domain", "partition.clients_per_domain=12", "partition.min_size=8"], 48),
}
FUSIONS = {
    "global": ["strategy.prompts=global"],
    "sum": ["strategy.fusion=sum"],
    "cross": ["strategy.fusion=cross"],
}
METHODS = {
    "zero-shot": ["strategy.prompts=none", "num_rounds=0"],
    "local only": ["strategy.prompts=local"],
    **{
        f"{tower}, {fusion}": [f"strategy.modalities={tower}", *words]
        for tower in ("text", "vision", "both")
        for fusion, words in FUSIONS.items()
    },
}
PROMPTFL, PFEDDC = "text, global", "both, cross"
KNOWN_AS = {PROMPTFL: "PromptFL", PFEDDC: "pFedDC"}


def cells(seeds):
    """(split, participation, method, seed) by importance."""
    main = ["zero-shot", "local only", PROMPTFL, PFEDDC]
    rest = [method for method in METHODS if method not in main]
    for methods in (main, rest):
        for seed, split, method in itertools.product(range(seeds), ("domain", "domain x3"), methods):
            yield split, 1.0, method, seed
    few = ["local only", PROMPTFL, PFEDDC]
    for split, share, method in itertools.product(("domain x5", "domain x12"), (1.0, 0.5), few):
        yield split, share, method, 0
    for seed, split, method in itertools.product(range(seeds), ("domain", "domain x3"), few):
        yield split, 0.5, method, seed


def words_of(given, split, participation, method, seed, *extra):
    words = ["strategy=pfeddc", "model=checkpoint", f"model.path={given.dual}", "model.name=dinov2s+minilm"]
    words += ["dataset=parquet", "dataset.name=pacs", f"dataset.path={given.data}", f"dataset.align={ALIGN}"]
    words += [f"dataset.image_size={given.size}", "dataset.validation=0.05", "dataset.client_validation=0"]
    words += [f"num_rounds={given.rounds}", f"participation={participation}", f"seed={seed}"]
    words += [
        f"client.local_steps={given.steps}",
        f"client.batch_size={given.batch}",
        f"client.lr={given.lr}",
    ]
    words += ["eval_every=100000", "checkpoint.every=0", "runtime.compile=false", f"device={given.device}"]
    words += ["client.precision=bf16", "runtime.runner=cohort"] if given.on_gpu else []
    words += [f"dataset.limit={given.limit}"] if given.limit else []
    # The method's own words last: zero-shot has no rounds.
    return [*words, *SPLITS[split][0], *METHODS[method], *extra]


def run(words, corpus):
    plain = resolved(compose_config(words))
    config = read(plain)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        summary = run_in_process(config, plain, words, Path(folder), corpus=corpus)
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return summary, rows, time.perf_counter() - began


def cell_of(summary, rows, seconds):
    """What the tables need of a run."""
    personal = summary["personal"]
    last = rows[-1]
    trained = rows[1:]
    clients = statistics.fmean(len(row["clients"]) for row in trained) if trained else 0
    return {
        **{model: personal[model] for model in ("global", "personal", "after") if model in personal},
        "by_participation": personal["by_participation"],
        "global_test_accuracy": last.get("test_accuracy"),
        "bytes_up_per_client": statistics.fmean(r["bytes_up"] for r in trained) / clients if trained else 0,
        "array_bytes_up_per_client": (
            statistics.fmean(sum(r["bytes_up_by_role"].values()) for r in trained) / clients if trained else 0
        ),
        "fusion": summary.get("fusion"),
        "local_moved": {key: value for key, value in last.items() if key.startswith("local_moved")},
        "train_loss": last.get("train_loss"),
        "round_seconds": statistics.median(r["seconds"]["train"] for r in trained) if trained else 0,
        "seconds": seconds,
    }


def make_dual(given, state):
    """Unpack the encoders where they come packed, and align them once."""
    given.dual = given.work / "dual"
    if not (given.dual / "alignment.json").is_file():
        vision, text = given.vision, given.text
        if given.carry:
            vision = unpack_encoder(given.carry / "vision", given.work / "vision")
            text = unpack_encoder(given.carry / "text", given.work / "text")
        words = [str(given.dual), f"vision={vision}", f"text={text}", "text_pooling=mean", "epochs=40"]
        words += ["dataset=parquet", f"dataset.path={given.data}", f"dataset.image_size={given.size}"]
        words += [f"dataset.align={ALIGN}", f"device={given.device}"]
        words += [f"dataset.limit={given.limit}"] if given.limit else []
        make(words)
    found = json.loads((given.dual / "alignment.json").read_text())
    keys = ("rows", "held_out_rows", "probe_accuracy", "zero_shot_accuracy", "chance", "clearly_above_chance")
    state["alignment"] = {key: found[key] for key in keys}


def tune(given, state, corpus):
    """The fusion's learning rate by what clients reach on their own validation rows; the test has no say."""
    if "fusion_lr" in state:
        return
    found = {}
    for times in given.fusion_times:
        extra = [f"client.fusion_lr={times * given.lr}", "dataset.client_validation=0.15", "personal=false"]
        _, rows, _ = run(words_of(given, "domain x3", 1.0, PFEDDC, 100, *extra), corpus)
        found[times * given.lr] = {
            "client_val_after": statistics.fmean(row["client_val_after"] for row in rows[1:][-3:]),
            **{key: rows[-1][key] for key in rows[-1] if key.startswith(("fusion_gap", "local_moved"))},
        }
        print("fusion_lr", times * given.lr, found[times * given.lr], flush=True)
    state["fusion_lr"] = max(found, key=lambda rate: found[rate]["client_val_after"])
    state["fusion_lr_tried"] = {f"{rate:g}": figures for rate, figures in found.items()}


def interval(values):
    """Mean and half the width of its 95 % interval (Student's t over seeds)."""
    if len(values) < 2:
        return statistics.fmean(values), None
    spread = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
    return statistics.fmean(values), float(spread)


def tables(done):
    """One line a set-up and method, over its seeds."""
    groups = {}
    for key, cell in done.items():
        split, participation, method, _ = json.loads(key)
        groups.setdefault((split, participation, method), []).append(cell)
    lines = []
    for (split, participation, method), found in groups.items():
        line = {"split": split, "clients": SPLITS[split][1], "participation": participation, "method": method}
        line["known_as"] = KNOWN_AS.get(method)
        for model, figure in itertools.product(("global", "personal", "after"), ("mean", "worst", "std")):
            values = [cell[model][figure] for cell in found if model in cell]
            if values:
                line[f"{model}_{figure}"], line[f"{model}_{figure}_ci"] = interval(values)
        line["array_bytes_up_per_client"] = found[0]["array_bytes_up_per_client"]
        line["fusion"] = [cell["fusion"]["state"] for cell in found if cell["fusion"]]
        line["seeds"] = len(found)
        lines.append(line)
    return lines


def show(lines):
    print(f"{'split':11}{'share':>6} {'method':16}{'seeds':>6}  {'global mean':>14} {'worst':>7}", end="")
    print(f"  {'personal mean':>14} {'worst':>7}  {'after':>7} {'bytes up':>9}")
    for line in lines:

        def figure(model, line=line):
            if f"{model}_mean" not in line:
                return f"{'-':>14} {'-':>7}"
            half = line[f"{model}_mean_ci"]
            mean = f"{line[f'{model}_mean']:.3f}" + ("" if half is None else f" ± {half:.3f}")
            return f"{mean:>14} {line[f'{model}_worst']:7.3f}"

        name = line["known_as"] or line["method"]
        after = f"{line['after_mean']:7.3f}" if "after_mean" in line else f"{'-':>7}"
        print(
            f"{line['split']:11}{line['participation']:6} {name:16}{line['seeds']:6}  {figure('global')}  "
            f"{figure('personal')}  {after} {line['array_bytes_up_per_client']:9.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--carry", type=Path, help="folder made by pfeddc_pack.py")
    parser.add_argument("--vision", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "fedfrozen-pfeddc")
    parser.add_argument("--out", type=Path, default=RESULTS / "pfeddc.json")
    parser.add_argument("--size", type=int, default=112, help="pixels a side (a multiple of 14)")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="local steps a round")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--fusion-times", type=float, nargs="+", default=[1.0, 5.0, 25.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=9.0, help="start no new cell after so long")
    parser.add_argument("--limit", type=int, default=None, help="at most so many rows, for a quick try")
    parser.add_argument("--only", nargs="+", default=None, help="methods, for a quick try")
    parser.add_argument("--splits", nargs="+", default=list(SPLITS), help="set-ups, for a quick try")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    if given.carry:
        given.data = given.carry / "pacs"
    if not given.data or not (given.carry or (given.vision and given.text)):
        parser.error("give --carry, or --vision, --text and --data")
    given.on_gpu = torch.cuda.is_available() and given.device != "cpu"
    given.work.mkdir(parents=True, exist_ok=True)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    began = time.perf_counter()

    settings = {
        k: v for k, v in vars(given).items() if k in ("size", "rounds", "steps", "batch", "lr", "limit")
    }
    state = {"settings": settings, "cells": {}}
    if given.out.is_file():
        found = json.loads(given.out.read_text())
        if found["settings"] == settings:
            state = {
                key: found[key]
                for key in found
                if key in ("settings", "cells", "alignment", "fusion_lr", "fusion_lr_tried")
            }

    def save():
        about = {
            "gpu": torch.cuda.get_device_name() if given.on_gpu else None,
            "lines": tables(state["cells"]),
        }
        path = write_result(given.out.stem, state | about)
        if path != given.out:
            shutil.move(path, given.out)

    make_dual(given, state)
    corpus = load_corpus(read(resolved(compose_config(words_of(given, "domain", 1.0, PFEDDC, 0)))))
    tune(given, state, corpus)
    save()
    for cell in cells(given.seeds):
        key = json.dumps(cell)
        unwanted = cell[0] not in given.splits or (given.only and cell[2] not in given.only)
        if unwanted or key in state["cells"]:
            continue
        if time.perf_counter() - began > 60 * given.minutes:
            print("Out of time: start it again for the rest.")
            break
        words = words_of(given, *cell, f"client.fusion_lr={state['fusion_lr']}")
        state["cells"][key] = cell_of(*run(words, corpus))
        found = state["cells"][key]
        print(
            key,
            {k: found[k] for k in ("global", "personal", "after") if k in found},
            f"{found['seconds']:.1f} s",
            flush=True,
        )
        save()
    show(tables(state["cells"]))
    left = sum(json.dumps(cell) not in state["cells"] for cell in cells(given.seeds))
    print(f"{len(state['cells'])} cells done, {left} left; {machine()['processor']}; written to {given.out}")


if __name__ == "__main__":
    main()
