"""What secret noise costs a private step, beside the noise of a seed that simulations use.

    python benchmarks/noise.py

The arrays are those of a MiniLM of six layers (384 wide, 22.7 million parameters): all of them, two layers
and the head as SAFL trains, and the head alone. Beside each, a whole step on --batch texts of --tokens:
clipping, noise, AdamW.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import arguments, interleave, ratio, show, spread, write_result
from transformers import BertConfig, BertForSequenceClassification

from fedfrozen_app.data.table import Table
from fedfrozen_app.models.task import Task
from fedfrozen_app.privacy.dpsgd import Recipe, train_steps
from fedfrozen_app.privacy.example_gradients import ExampleGradients, plain_loss
from fedfrozen_app.privacy.noise import Noise, SecretNoise, SeededNoise

MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "num_labels": 12,
}
TRAINED = {
    "all": ("",),
    "two layers and the head": (".layer.4.", ".layer.5.", "classifier"),
    "the head": ("classifier",),
}


class NoNoise(SeededNoise):
    def added_to(self, value: torch.Tensor, std: float) -> torch.Tensor:
        return value


def main() -> None:
    parser = arguments(str(__doc__), repeats=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = BertForSequenceClassification(BertConfig(**MINILM)).to(device).eval()
    ids = torch.randint(1, 30_000, (options.batch, options.tokens), device=device)
    table = Table({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids[:, 0] % 12)
    task = Task(model, kind="text")
    figures: dict[str, Any] = {}
    rows = []
    for part, words in TRAINED.items():
        names = [name for name, _ in model.named_parameters() if any(word in name for word in words)]
        parameters = {name: model.get_parameter(name) for name in names}
        found = interleave(
            sources_of(device, lambda source, p=parameters: time_noise(source, p)), options.repeats
        )
        steps = interleave(
            sources_of(
                device, lambda source, n=names, p=parameters: time_step(source, model, task, table, n, p)
            ),
            options.repeats,
        )
        count = sum(value.numel() for value in parameters.values())
        figures[part] = {
            "elements": count,
            "noise_seconds": found,
            "step_seconds": steps,
            "secret_over_seeded_noise": ratio(found["secret"], found["seeded"]),
            "step_secret_over_seeded": ratio(steps["secret"], steps["seeded"]),
            "step_secret_over_none": ratio(steps["secret"], steps["none"]),
            "nanoseconds_an_element": statistics.median(found["secret"]) / count * 1e9,
        }
        own = figures[part]
        rows.append(
            [
                part,
                f"{count:,}",
                f"{spread(found['secret']):.4f}",
                f"{own['secret_over_seeded_noise']:.1f}",
                f"{spread(steps['secret']):.2f}",
                f"{own['step_secret_over_seeded']:.2f}",
                f"{own['step_secret_over_none']:.2f}",
            ]
        )
        print(rows[-1], flush=True)
    path = write_result("noise", {"batch": options.batch, "tokens": options.tokens, "figures": figures})
    header = ["trained", "elements", "noise, s", "/ seeded", "step, s", "/ seeded", "/ without noise"]
    show("The price of secret noise", header, rows, {}, path)


def sources_of(device: torch.device, work: Callable[[Noise], float]) -> dict[str, Callable[[], float]]:
    made: dict[str, Callable[[], Noise]] = {
        "secret": lambda: SecretNoise(device),
        "seeded": lambda: SeededNoise(device, 0, "0", 1),
        "none": lambda: NoNoise(device, 0, "0", 1),
    }
    return {name: lambda make=make: work(make()) for name, make in made.items()}


def time_noise(source: Noise, parameters: dict[str, torch.nn.Parameter]) -> float:
    sums = [torch.zeros_like(value) for value in parameters.values()]
    began = time.perf_counter()
    for value in sums:
        source.added_to(value, 1.0)
    if sums[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def time_step(
    source: Noise,
    model: torch.nn.Module,
    task: Task,
    table: Table,
    names: list[str],
    parameters: dict[str, torch.nn.Parameter],
) -> float:
    """One step with every row in the sample."""
    recipe = Recipe(rate=1.0, steps=1, noise=1.0, max_grad_norm=1.0, batch=len(table), physical_batch=4)
    gradients = ExampleGradients(model, task, names, plain_loss)
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=1e-6)
    units = [np.array([row]) for row in range(len(table))]
    began = time.perf_counter()
    train_steps(gradients, parameters, optimizer, table, units, recipe, source)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
