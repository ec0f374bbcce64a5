"""Memory and time of a private step: a gradient for every example against ghost clipping.

    python benchmarks/clipping.py

A BERT of random weights trains two of its layers and the head, as SAFL would, on --batch texts of --tokens.
Every step is taken in a process of its own. Memory is what it needs beyond the loaded model.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from common import (
    arguments,
    in_fresh_process,
    interleave,
    peak_bytes,
    ratio,
    reset_peak,
    resident_bytes,
    show,
    spread,
    write_result,
)
from transformers import BertConfig, BertForSequenceClassification

from fedfrozen_app.data.table import Table
from fedfrozen_app.models.task import Task
from fedfrozen_app.privacy.dpsgd import Clipping
from fedfrozen_app.privacy.example_gradients import ExampleGradients, plain_loss
from fedfrozen_app.privacy.ghost import GhostClipping

LAYERS = 4
TRAINED = (".layer.1.", ".layer.3.", "pooler", "classifier")


def step(way: str, width: int, batch: int, tokens: int, device: str) -> dict[str, float]:
    """One step after another that warms up, and its peak."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        num_labels=12,
    )
    model = BertForSequenceClassification(config).to(device).eval()
    names = [name for name, _ in model.named_parameters() if any(part in name for part in TRAINED)]
    parameters = {name: model.get_parameter(name) for name in names}
    ids = torch.randint(1, config.vocab_size, (batch, tokens), device=device)
    table = Table({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids[:, 0] % 12)
    task = Task(model, kind="text")
    made: dict[str, Callable[[], Clipping]] = {
        "per_example": lambda: ExampleGradients(model, task, names, plain_loss),
        "ghost": lambda: GhostClipping(model, task, names, 1.0),
    }
    clipping = made[way]()
    clipping.load(table, torch.arange(2, device=device), parameters)
    on_gpu = device == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else resident_bytes()
    torch.cuda.reset_peak_memory_stats() if on_gpu else reset_peak()
    began = time.perf_counter()
    losses = clipping.load(table, torch.arange(batch, device=device), parameters)
    losses.sum().item()  # waits for a GPU
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak_bytes()
    return {"seconds": seconds, "megabytes": (peak - before) / 1e6}


def main() -> None:
    parser = arguments(str(__doc__), repeats=3)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    size = (options.width, options.batch, options.tokens, options.device)
    ways = ("per_example", "ghost")
    found = interleave(
        {way: lambda way=way: in_fresh_process(step, way, *size) for way in ways}, options.repeats
    )
    figures: dict[str, dict[str, Any]] = {
        way: {key: [one[key] for one in found[way]] for key in ("seconds", "megabytes")} for way in ways
    }
    shares = {
        key: ratio(figures["ghost"][key], figures["per_example"][key]) for key in ("seconds", "megabytes")
    }
    path = write_result("clipping", {"figures": figures, "ghost_over_per_example": shares})
    rows = [
        [way, f"{spread(own['megabytes']):.0f}", f"{spread(own['seconds']):.2f}"]
        for way, own in figures.items()
    ]
    rows.append(["ghost / per_example", f"{shares['megabytes']:.2f}", f"{shares['seconds']:.2f}"])
    show("A private step", ["privacy.clipping", "MB beyond the model", "seconds"], rows, {}, path)


if __name__ == "__main__":
    main()
