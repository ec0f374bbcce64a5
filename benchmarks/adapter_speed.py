"""Adapters of ten clients at the sizes of ViT-B and BERT-base: rows a second and memory.

    python benchmarks/adapter_speed.py                                    (on a GPU)
    python benchmarks/adapter_speed.py --device cpu --tiny --repeats 2    (to see it work)

Clients stacked over one base, clients in turn, and central training of the same model by peft on batches of
all clients' size, with its base frozen, plain and compiled. Queries and values have adapters of rank 16; the
head trains too. Weights and rows are random, which takes as long as real ones. Every contestant is a process
of its own, so that its peak of memory is its own; of its rounds the first two, which record and compile, are
not counted.
"""

import io
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, arguments, in_fresh_process, peak_bytes, ratio, show, spread, write_result
from random_rows import random_corpus

from fedfrozen_app.config import compose_config, compose_run, read, resolved
from fedfrozen_app.data.federated import share_out
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.models.task import Batch
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

CLIENTS, STEPS, RANK, UNCOUNTED = 10, 15, 16, 2
ADAPTERS = ["adapter=lora", f"adapter.rank={RANK}", f"adapter.alpha={RANK}", "adapter.targets=[query,value]"]
APP = {
    "clients stacked": ["runtime.runner=cohort"],
    "clients stacked, compiled": ["runtime.runner=cohort", "runtime.compile=true"],
    "clients in turn": ["runtime.runner=sequential"],
}
CENTRAL = {"central, peft": False, "central, peft, compiled": True}
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
CASES: dict[str, tuple[str, int, int, list[str]]] = {  # task, size of a row, batch, words
    "ViT-B": ("image", 224, 32, ["dataset=digits", "model.model_type=vit", "+model.config.patch_size=16"]),
    "BERT-base": ("text", 128, 32, ["dataset=digit_words", "model.model_type=bert"]),
}


def words_for(case: str, device: str, tiny: bool, rounds: int) -> list[str]:
    *_, batch, words = CASES[case]
    shape = [f"+model.config.{key}={value}" for key, value in (TINY if tiny else BASE).items()]
    none = ["+model.config.hidden_dropout_prob=0", "+model.config.attention_probs_dropout_prob=0"]
    return [
        *(words[0], "model=hub", "model.source=config", "model.path=null", f"model.name={case}", *words[1:]),
        *(*shape, *none, "strategy=fedavg", f"num_clients={CLIENTS}", "partition=iid"),
        *(f"client.batch_size={batch}", f"client.local_steps={STEPS}", "client.lr=1e-4"),
        *("client.precision=bf16", "dataset.validation=0", "dataset.client_validation=0"),
        *(f"num_rounds={rounds}", "eval_every=1000", "checkpoint.every=0", "track.tensorboard=false"),
        f"device={device}",
    ]


def app_rates(words: list[str], corpus: Any, images: int) -> list[float]:
    composed = compose_run(words)
    with tempfile.TemporaryDirectory() as out, redirect_stdout(io.StringIO()):
        run_in_process(Job(composed, Path(out)), corpus=corpus)
        rows = [row for row in read_rows(Path(out)) if row["round"] > UNCOUNTED]
    return [images / (row["seconds"]["train"] + row["seconds"]["aggregate"]) for row in rows]


def central_rates(words: list[str], corpus: Any, images: int, compiled: bool, repeats: int) -> list[float]:
    from peft import LoraConfig, get_peft_model

    config = read(resolved(compose_config(words)))
    worker = Worker(config, corpus, shares=share_out(corpus, config, CLIENTS))
    lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=r".*\.(query|value|q_proj|v_proj)",
                      modules_to_save=["classifier"])  # fmt: skip
    model = get_peft_model(worker.model.train(), lora)
    trained = [value for value in model.parameters() if value.requires_grad]
    called = torch.compile(model) if compiled else model
    task = worker.task.with_call(lambda parameters, inputs: called(**inputs).logits)
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    batch, rates = images // STEPS, []
    for _ in range(UNCOUNTED + repeats):
        began = time.perf_counter()
        for _ in range(STEPS):
            index = torch.randint(len(corpus.train), (batch,), device=worker.device)
            loss = task.loss({}, Batch(*worker.take(index)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if worker.device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(images / (time.perf_counter() - began))
    return rates[UNCOUNTED:]


def one_way(case: str, way: str, device: str, tiny: bool, repeats: int) -> dict[str, Any]:
    """In a process that does nothing else."""
    task, size, batch, _ = CASES[case]
    images = CLIENTS * batch * STEPS
    corpus = random_corpus(task, 32 if tiny else size, images, 100)
    words = words_for(case, device, tiny, UNCOUNTED + repeats)
    if way in APP:
        rates = app_rates([*words, *ADAPTERS, *APP[way]], corpus, images)
    else:
        rates = central_rates(words, corpus, images, CENTRAL[way], repeats)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else peak_bytes()
    return {"rates": rates, "peak_bytes": peak}


def lines(found: dict[str, dict[str, Any]]) -> Sequence[Sequence[str]]:
    rows = []
    for case, ways in found.items():
        stacked = ways["clients stacked"]["rates"]
        for way, own in ways.items():
            count = min(len(stacked), len(own["rates"]))  # commands may differ in their repeats
            times = ratio(stacked[:count], own["rates"][:count])
            told = "" if way == "clients stacked" else f"{times:.2f}"
            rows.append([case, way, f"{spread(own['rates']):.0f}", told, f"{own['peak_bytes'] / 1e9:.1f}"])
    return rows


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="+", choices=(*APP, *CENTRAL), default=(*APP, *CENTRAL))
    parser.add_argument("--tiny", action="store_true", help="small models and rows, to see it work")
    parser.add_argument("--out", type=Path, help="the result file, in place of results/adapter_speed.json")
    options = parser.parse_args()
    path = options.out or RESULTS / "adapter_speed.json"
    # What an earlier command measured stays, unless it is asked for again.
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())["found"] if path.exists() else {}
    for case in options.cases:
        found.setdefault(case, {})
        for way in options.ways:
            given = (case, way, options.device, options.tiny, options.repeats)
            found[case][way] = in_fresh_process(one_way, *given)
            print(case, way, f"{spread(found[case][way]['rates']):.0f}", flush=True)
            path = write_result("adapter_speed", {"found": found}, options.out)  # what is done is kept
    heads = ("", "", "rows a second", "stacked is times that", "GB")
    show("Adapters of ten clients: median (range)", heads, lines(found), {}, path)


if __name__ == "__main__":
    main()
