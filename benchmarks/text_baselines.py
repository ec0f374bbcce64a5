"""Four public text data sets: a Transformer trained in a federation beside plain models of the same rows.

Design, written before the first run. Data, with the published train and test rows (`prepare`):

    trec     questions, 6 classes (Li and Roth 2002), as in yao8839836/text_gcn: 5,452 and 500 short texts.
             The file's first word is the fine class of the question: it is taken out.
    ohsumed  MEDLINE abstracts of one of 23 diseases (Hersh et al. 1994; the split of Yao et al. 2019), as in
             yao8839836/text_gcn: 3,357 and 4,043 long texts
    ncbi     NCBI-disease (Dogan et al. 2014), as in cambridgeltl/MTL-Bioinformatics-2016 (CC BY 4.0):
             sentences without document marks
    bc5cdr   BC5CDR (Li et al. 2016), chemicals and diseases as one type, as in allenai/scibert: 500 and 500
             abstracts with document marks

Arms (`ARMS`), FedAvg over five clients, batches of 16, AdamW, one pass over a client's rows in a round:
`scratch` is bert_small with subwords learned from the server's tenth of the train rows, lr 3e-3; `chunks` is
the same with dataset.long_texts=chunks (ohsumed); `minilm` is all-MiniLM-L6-v2, lr 2e-4, its new head 2e-3
(trec: on the other data a run takes more than a quarter of an hour of a core). Classes are dealt by
Dirichlet(1), sentences and abstracts at random. Plain models (`baselines`) train on what the clients of such
a run have together: those of `fedfrozen baselines`, and for entities a conditional random field
(sklearn-crfsuite: pip install sklearn-crfsuite) on the same clues as the logistic regression.

Outcome: accuracy, or F1 of whole entities, of the last round on the test rows; the score of the best round is
not used. Words beyond the length that a model reads are not scored for it, and are for the plain models; how
many texts are cut is noted. Seeds give weights, partition and batch order; the mean and every seed are shown,
and no interval of so few. Every run counts, and a run whose row is there is not repeated. Rows of "TF-IDF and
logistic regression, C=1" are of the baseline that this package had before it saw them.

    python benchmarks/text_baselines.py prepare NAME SOURCE FOLDER    (SOURCE: the checkout named above)
    python benchmarks/text_baselines.py run NAME ARM FOLDER [--seed N] [--minilm DIR]
    python benchmarks/text_baselines.py baselines NAME FOLDER
    python benchmarks/text_baselines.py show
"""

import argparse
import csv
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from cells import read
from common import RESULTS
from provenance import require_commit
from text_results import NAME, TextBaselines

from fedfrozen_app.baselines.models import Baseline, clues
from fedfrozen_app.baselines.same_rows import SameRows, same_rows
from fedfrozen_app.baselines.score import measured, scores
from fedfrozen_app.config import compose_run
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.data.sources.entities import iob2
from fedfrozen_app.files.append import append
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

FILE = RESULTS / NAME
EVERY = [
    *("strategy=fedavg", "num_clients=5", "client.local_epochs=1", "baseline=false"),
    *("device=cpu", "runtime.threads=1", "track.tensorboard=false", "checkpoint.every=0"),
]
CLASSES = ["dataset=text", "partition=dirichlet", "partition.alpha=1"]
ENTITIES = ["dataset=conll", "partition=iid", "dataset.max_tokens=128"]
DATA = {"trec": CLASSES, "ohsumed": CLASSES, "ncbi": ENTITIES, "bc5cdr": ENTITIES}
ROUNDS = {"trec": 20, "ohsumed": 10, "ncbi": 15, "bc5cdr": 15}
SCRATCH = ["model=bert_small", "client.lr=3e-3", "eval_every=5"]
ARMS = {
    "scratch": SCRATCH,
    "chunks": [*SCRATCH, "dataset.long_texts=chunks"],
    "minilm": ["model=checkpoint", "client.lr=2e-4", "client.head_lr=2e-3", "num_rounds=3"],
}
# The default length of abstracts would be 512 tokens, which takes a quarter of an hour of a core.
CUT = ["dataset.max_tokens=128"]
SPLITS = {"train": "train", "test": "test"}


def prepare_trec(source: Path, folder: Path) -> None:
    rows: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    lines = (source / "data/corpus/TREC.txt").read_text(encoding="latin-1").splitlines()
    for line, about in zip(lines, (source / "data/TREC.txt").read_text().splitlines(), strict=True):
        _, split, label = about.split("\t")
        rows[split].append((line.partition(" ")[2].strip(), label))  # without the fine class
    write_texts(rows, folder)


def prepare_ohsumed(source: Path, folder: Path) -> None:
    rows = {}
    for split, name in (("train", "training"), ("test", "test")):
        files = sorted((source / "data/ohsumed_single_23" / name).glob("*/*"))
        texts = (" ".join(file.read_text(encoding="latin-1").split()) for file in files)
        rows[split] = [(text, file.parent.name) for text, file in zip(texts, files, strict=True)]
    write_texts(rows, folder)


def write_texts(rows: dict[str, list[tuple[str, str]]], folder: Path) -> None:
    for split, of_split in rows.items():
        with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *of_split])


def prepare_ncbi(source: Path, folder: Path) -> None:
    for split in SPLITS:
        shutil.copy(source / f"data/NCBI-disease-IOB/{split}.tsv", folder / f"{split}.conll")


def prepare_bc5cdr(source: Path, folder: Path) -> None:
    for split in SPLITS:
        shutil.copy(source / f"data/ner/bc5cdr/{split}.txt", folder / f"{split}.conll")


PREPARE = {
    "trec": prepare_trec,
    "ohsumed": prepare_ohsumed,
    "ncbi": prepare_ncbi,
    "bc5cdr": prepare_bc5cdr,
}


def words_of(data: str, arm: str, folder: Path, seed: int, minilm: Path | None) -> list[str]:
    own = [f"num_rounds={ROUNDS[data]}", *DATA[data], *ARMS[arm]]
    if data == "ohsumed" and arm != "chunks":
        own += CUT
    if arm == "minilm":
        own.append(f"model.path={minilm}")
    return [*EVERY, *own, f"dataset.path={folder}", f"seed={seed}"]


def run(data: str, arm: str, folder: Path, seed: int, minilm: Path | None) -> None:
    commit = require_commit()
    if any((row["data"], row["model"], row.get("seed")) == (data, arm, seed) for row in read(FILE)):
        raise SystemExit(f"The row of {data}, {arm}, seed {seed} is there.")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) / "run"
        summary = run_in_process(Job(compose_run(words_of(data, arm, folder, seed, minilm)), place, None))
        rows, account = read_rows(place), json.loads((place / "data.json").read_text())
    key = "test_f1" if data in ("ncbi", "bc5cdr") else "test_accuracy"
    keep(
        {
            "data": data,
            "model": arm,
            "seed": seed,
            "score": rows[-1][key],
            "curve": [row[key] for row in rows if row.get(key) is not None],
            "rounds": rows[-1]["round"],
            "texts": account["texts"],
            "train_rows": sum(client["rows"] for client in account["clients"].values()),
            "test_rows": account["rows"]["test"]["rows"],
            "seconds": summary["seconds"],
            "commit": commit,
        }
    )


def baselines(data: str, folder: Path) -> None:
    """The plain models, and for classes the most frequent one of the train rows."""
    commit = require_commit()
    config = compose_run(words_of(data, "scratch", folder, 0, None)).config
    corpus = load_corpus(config)
    rows = same_rows(config, corpus, share_out(corpus, config, config.num_clients), quick=False)
    assert rows is not None
    found = scores(rows)
    more = CRF if rows.task == "tokens" else MAJORITY
    began = time.perf_counter()
    found.append({"name": more.name, **measured(rows, more.predict(rows)), "train_rows": len(rows.train)})
    found[-1]["seconds"] = time.perf_counter() - began
    done = {row["model"] for row in read(FILE) if row["data"] == data}
    for one in (each for each in found if each["name"] not in done):
        score = one["f1"] if "f1" in one else one["accuracy"]
        about = {"train_rows": one["train_rows"], "seconds": one["seconds"], "commit": commit}
        keep({"data": data, "model": one["name"], "score": score} | about)


def conditional_random_field(rows: SameRows) -> list[list[str]]:
    import sklearn_crfsuite

    model = sklearn_crfsuite.CRF(algorithm="lbfgs", c1=0.1, c2=0.1, max_iterations=100)
    model.fit([clues(words) for words in rows.train], rows.train_labels)
    return [iob2(list(tags)) for tags in model.predict([clues(words) for words in rows.test])]


def most_frequent(rows: SameRows) -> Any:
    from sklearn.dummy import DummyClassifier

    return DummyClassifier().fit(rows.train, rows.train_labels).predict(rows.test)


CRF = Baseline("conditional random field", conditional_random_field, quick=False)
MAJORITY = Baseline("the most frequent class", most_frequent)


def keep(row: dict[str, Any]) -> None:
    append(FILE, json.dumps(row))
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("prepare", "run", "baselines"):
        verb = verbs.add_parser(name)
        verb.add_argument("data", choices=DATA)
        if name == "prepare":
            verb.add_argument("source", type=Path)
        if name == "run":
            verb.add_argument("arm", choices=ARMS)
            verb.add_argument("--seed", type=int, default=0)
            verb.add_argument("--minilm", type=Path)
        verb.add_argument("folder", type=Path)
    verbs.add_parser("show")
    given = parser.parse_args()
    if given.verb == "prepare":
        given.folder.mkdir(parents=True, exist_ok=True)
        PREPARE[given.data](given.source, given.folder)
    elif given.verb == "run":
        run(given.data, given.arm, given.folder.resolve(), given.seed, given.minilm)
    elif given.verb == "baselines":
        baselines(given.data, given.folder.resolve())
    else:
        print(TextBaselines(RESULTS).every_seed())


if __name__ == "__main__":
    main()
