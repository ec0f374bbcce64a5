"""On a GPU: a round of ten clients that train a U-Net, stacked and one after another; images a second.

    python benchmarks/unet_speed.py [--device cpu --clients 3 --pictures 4 --side 32 --width 4]

Random pictures with random masks of two classes: only speed is measured. FedAvg, AdamW, bf16 on a GPU, every
client has as many pictures. Contestants take turns, a round each; the first, which compiles and records, does
not count. A round is training and aggregation; its evaluation is left out.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, interleave, ratio, show, spread, write_result
from PIL import Image
from turns import AppTurns, unheard

from fedfrozen_app.config import compose_run
from fedfrozen_app.data.federated import load_corpus

RUNNERS = {
    "stacked": ["runtime.runner=cohort", "runtime.compile=true"],
    "stacked, not compiled": ["runtime.runner=cohort", "runtime.compile=false"],
    "in turn, recorded": ["runtime.runner=sequential"],
    "in turn, step by step": ["runtime.runner=sequential", "runtime.capture=false"],
}


def pictures(folder: Path, count: int, side: int) -> None:
    random = np.random.default_rng(0)
    for split, number in (("train", count), ("test", 4)):
        for kind, shape, top in (("images", (side, side, 3), 256), ("masks", (side, side), 2)):
            place = folder / split / kind
            place.mkdir(parents=True)
            for index in range(number):
                pixels = random.integers(0, top, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{index:05d}.png", compress_level=0)


def words_for(options: Any, folder: Path) -> list[str]:
    precision = "bf16" if options.device == "cuda" else "float32"
    words = [
        "strategy=fedavg",
        "dataset=masks",
        f"dataset.path={folder}",
        f"dataset.image_size={options.side}",
    ]
    words += ["dataset.channels=3", "dataset.validation=0", "dataset.client_validation=0", "partition=iid"]
    words += ["model=unet", f"model.config.width={options.width}", f"num_clients={options.clients}"]
    words += [f"client.batch_size={options.batch}", "client.local_epochs=1", f"client.precision={precision}"]
    words += ["client.lr_schedule=constant", "num_rounds=1000", "checkpoint.every=0"]
    return [*words, f"device={options.device}", "eval_every=1000"]


def measured(words: list[str], images: int, repeats: int) -> dict[str, list[float]]:
    """Images a second of each runner, round by round."""
    corpus = load_corpus(compose_run(words).config)
    runs = {name: AppTurns([*words, *more], corpus) for name, more in RUNNERS.items()}

    def turn(name: str) -> float:
        seconds = runs[name].turn()["seconds"]
        return images / (seconds["train"] + seconds["aggregate"])

    for name in runs:
        turn(name)
    found = interleave({name: partial(turn, name) for name in runs}, repeats)
    for run in runs.values():
        run.close()
    return found


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--pictures", type=int, default=64, help="of each client")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--side", type=int, default=96)
    parser.add_argument("--width", type=int, default=16)
    options = parser.parse_args()
    images = options.clients * options.pictures
    with tempfile.TemporaryDirectory() as folder, unheard():
        pictures(Path(folder), images, options.side)
        found = measured(words_for(options, Path(folder)), images, options.repeats)
    rates = {name: spread(values) for name, values in found.items()}
    times = {name: ratio(found["stacked"], values) for name, values in found.items() if name != "stacked"}
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    path = write_result(
        "unet_speed",
        {"setting": vars(options), "gpu": gpu, "images_per_second": rates, "stacked_over": times},
    )
    rows = [
        (name, f"{rate:.0f}", f"{times[name]:.2f}" if name in times else "") for name, rate in rates.items()
    ]
    show("U-Net, ten clients: median (range)", ("", "images/s", "stacked, times as fast"), rows, {}, path)


if __name__ == "__main__":
    main()
