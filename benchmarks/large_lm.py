"""A large language model: seconds a step, tokens a second and memory, with and without checkpointing.

    python benchmarks/large_lm.py                                     (a LLaMA of 1 B parameters, on a GPU)
    python benchmarks/large_lm.py --hidden 64 --layers 2 --tokens 64  (small, on a CPU)

The model is built from its configuration with random weights; each way of training runs in a fresh process:
all parameters, adapters alone, and adapters on a base in bfloat16, each with activations kept and computed
again. The steps are a client's own, as the sequential runner takes them on its worker model. What
`fedfrozen plan` foretells of memory stands beside what was measured. Texts are bytes, so that no tokenizer is
needed; the vocabulary is the model's.
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import arguments, in_fresh_process, show, write_result

from fedfrozen_app.commands.forecast import forecast, ground_of, outlined
from fedfrozen_app.commands.step_memory import measure, step_memory
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.models.wrapper import wrapper_of

STEPS = 10
WAYS = {
    "full": [],
    "full, checkpointing": ["model.gradient_checkpointing=true"],
    "lora": ["adapter=lora"],
    "lora, checkpointing": ["adapter=lora", "model.gradient_checkpointing=true"],
    "lora, bf16 base": ["adapter=lora", "model.dtype=bfloat16"],
    "lora, bf16 base, checkpointing": [
        *("adapter=lora", "model.dtype=bfloat16", "model.gradient_checkpointing=true")
    ],
}


def model_words(options: Any) -> list[str]:
    """A LLaMA whose parts have the proportions of the one of 1 B."""
    heads = max(1, options.hidden // 64)
    sizes = {
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "intermediate_size": 4 * options.hidden,
    }
    words = [f"model.config.{key}={value}" for key, value in sizes.items()]
    return [*words, f"+model.config.vocab_size={options.vocabulary}"]


def one_way(options: Any, more: list[str]) -> dict[str, Any]:
    """Measured in this process, which does nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        rows = 2 * options.batch * (STEPS + 1)
        line = json.dumps({"text": "lorem ipsum " * (options.tokens // 12 + 1)})
        path = Path(folder) / "rows.jsonl"
        path.write_text(f"{line}\n" * rows)
        words = ["dataset=instructions", f"dataset.path={path}", f"dataset.max_tokens={options.tokens}"]
        words += ["dataset.validation=0", "dataset.client_validation=0", "num_clients=1", "partition=iid"]
        words += ["strategy=fedavg", f"client.batch_size={options.batch}", "runtime.runner=sequential"]
        words += [f"client.precision={options.precision}", f"device={options.device}", "num_rounds=1"]
        words += ["client.local_epochs=1", "client.lr=1e-5"]
        config = read(resolved(compose_config([*words, *model_words(options), *more])))
        ground = ground_of(config)
        plan = forecast(config, ground)
        found = measure(config, outlined(config, ground), steps=STEPS)
        outline = wrapper_of(config).outline(config, ground.shape)
        expected = step_memory(config, ground.shape, plan.stages[0].plan.trained, ground.tokens)
    return {
        "parameters": sum(value.numel() for value in outline.parameters()),
        "trained": plan.stages[0].trained_params,
        "seconds_a_step": found.seconds_a_step,
        "tokens_a_second": options.batch * options.tokens / found.seconds_a_step,
        "peak_bytes": found.peak_bytes,
        "foretold_bytes": expected.total,
        "device": found.device,
    }


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--hidden", type=int, default=2048, help="width; 2048 in 16 layers make 1 B parameters"
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=1024, help="of a row")
    parser.add_argument("--batch", type=int, default=4, help="rows of a step")
    usual = "bf16" if torch.cuda.is_available() else "float32"
    parser.add_argument("--precision", default=usual, choices=("float32", "tf32", "bf16"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, help="the result file, in place of results/large_lm.json")
    options = parser.parse_args()
    setting = {key: value for key, value in vars(options).items() if key != "out"}
    figures, rows = {}, []
    for way in options.ways:
        found = in_fresh_process(partial(one_way, options, WAYS[way]))
        figures[way] = found
        print(way, found, flush=True)
        peak = "–" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 2**30:.3g}"
        rows.append(
            (
                way,
                f"{found['trained']:,} of {found['parameters']:,}",
                f"{found['seconds_a_step']:.3f}",
                f"{found['tokens_a_second']:,.0f}",
                peak,
                f"{found['foretold_bytes'] / 2**30:.3g}",
            )
        )
    checks = {}
    for way in ("full", "lora"):
        pair = [figures[name] for name in (way, f"{way}, checkpointing") if name in figures]
        if len(pair) == 2 and pair[0]["peak_bytes"] is not None:
            checks[f"{way}_checkpointing_takes_less"] = pair[1]["peak_bytes"] < pair[0]["peak_bytes"]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    result = {"gpu": gpu, "setting": setting, "figures": figures, "checks": checks}
    path = write_result("large_lm" if gpu else "large_lm_cpu", result, options.out)
    head = ("", "trained", "s a step", "tokens/s", "peak GiB", "foretold GiB")
    show("A language model of one client", head, rows, checks, path)


if __name__ == "__main__":
    main()
