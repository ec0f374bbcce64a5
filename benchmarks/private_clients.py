"""Private clients together against one after another: seconds a round, at the size of MiniLM.

    python benchmarks/private_clients.py                                   (on a GPU; --repeats 5)
    python benchmarks/private_clients.py --device cpu --tiny --repeats 2   (to see it work)

Eight clients with 160 texts of 128 tokens each, as MTSamples has them, batches of 64, epsilon 8: a head
alone, adapters and the head, and SAFL's two layers. The texts are random, which takes as long as real ones;
the encoder has MiniLM's size. Both train the same round by turns, in the precision of the study on MTSamples
(--precision). The first rounds of each are not counted: there a GPU's steps are recorded.
"""

from typing import Any

from common import Spread, arguments, interleave, ratio, show, spread, write_result
from random_rows import random_corpus
from turns import AppTurns, unheard

CLIENTS, ROWS, TOKENS, LEAST = 8, 160, 128, 8
FIRST = {"cohort": 6, "sequential": 1}  # rounds that are not counted
SIZE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
PLANS = {
    "the head": ["strategy=safl", "strategy.select=none"],
    "adapters of rank 4": ["strategy=fedavg", "adapter=lora", "adapter.rank=4"],
    "two layers": ["strategy=safl", "strategy.top_k=2", "strategy.select=fixed"],
}


def words_for(options: Any, plan: str) -> list[str]:
    size = [f"+model.config.{key}={value}" for key, value in (TINY if options.tiny else SIZE).items()]
    none = ["+model.config.hidden_dropout_prob=0", "+model.config.attention_probs_dropout_prob=0"]
    return [
        *PLANS[plan],
        *("dataset=digit_words", "model=hub", "model.source=config", "model.path=null", "model.name=minilm"),
        *("model.model_type=bert", f"dataset.max_tokens={TOKENS}", *size, *none, "partition=iid"),
        *(f"num_clients={CLIENTS}", "client.batch_size=64", "privacy=dp_sgd", "privacy.epsilon=8"),
        *("num_rounds=1000", "eval_every=1000", "checkpoint.every=0", f"device={options.device}"),
        f"client.precision={options.precision}",
    ]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--precision", default="tf32", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--tiny", action="store_true", help="a small model, to see it work")
    options = parser.parse_args()
    corpus = random_corpus("text", TOKENS, CLIENTS * ROWS, 100)
    found: dict[str, dict[str, list[float]]] = {}
    for plan in options.plans:
        words = words_for(options, plan)
        runs = {way: AppTurns([*words, f"runtime.runner={way}"], corpus) for way in ("cohort", "sequential")}
        with unheard():
            turns = {way: lambda run=run: run.turn()["seconds"]["train"] for way, run in runs.items()}
            for way, count in FIRST.items():
                for _ in range(count):
                    turns[way]()
            found[plan] = interleave(turns, options.repeats)
        for run in runs.values():
            run.close()
    times: dict[str, Spread] = {
        plan: ratio(each["sequential"], each["cohort"]) for plan, each in found.items()
    }
    path = write_result("private_clients", {"seconds": found, "times_quicker": times})
    rows = [
        [plan, f"{spread(each['sequential']):.2f}", f"{spread(each['cohort']):.2f}", f"{times[plan]:.1f}"]
        for plan, each in found.items()
    ]
    checks = {f"{plan}: at least {LEAST} times": value.median >= LEAST for plan, value in times.items()}
    heads = ("trained", "one after another, s", "together, s", "times quicker")
    show("A round of eight private clients", heads, rows, checks, path)


if __name__ == "__main__":
    main()
