"""NIID-Bench's FedAvg as a plain torch loop: nothing here uses fedfrozen.

    python benchmarks/niid_loop.py --data DIR --seed 0 --device cuda

`--data` is a folder with CIFAR-10's train.parquet and test.parquet. Where this loop and `fedfrozen` agree on
the same rows, a distance to the published figures comes from the recipe; where they differ, from our code.

The recipe: 10 clients, all in every round; 50 rounds of 10 local epochs; batches of 64, the last one smaller;
SGD with rate 0.01, momentum 0.9 from zero in every round, weight decay 1e-5; pixels in 0..1; reflecting
padding of 4 pixels, a random crop and a random flip; means weighted by rows; torch's initial weights.
"""

import argparse
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import torch
from niid_partition import label_skew
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

BATCH, RATE, MOMENTUM, DECAY, PAD = 64, 0.01, 0.9, 1e-5, 4


def read_split(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(n, 3, 32, 32) uint8 and (n,) labels."""
    rows = parquet.read_table(folder / f"{name}.parquet")
    pictures = [
        np.asarray(Image.open(io.BytesIO(row["bytes"])).convert("RGB")) for row in rows["image"].to_pylist()
    ]
    return np.stack(pictures).transpose(0, 3, 1, 2), rows["label"].to_numpy().copy()


def network() -> nn.Sequential:
    first, second = ([nn.Conv2d(*size), nn.ReLU(), nn.MaxPool2d(2)] for size in ((3, 6, 5), (6, 16, 5)))
    dense = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*first, *second, nn.Flatten(), *dense)


class Client:
    """Local training on one device. On a GPU the step of a full batch is captured once and replayed."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
        if device.type == "cuda":
            self.pictures = torch.zeros(BATCH, 3, 32, 32, device=device)
            self.labels = torch.zeros(BATCH, dtype=torch.long, device=device)
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):  # warm-up, as capturing asks for
                for _ in range(3):
                    self.step(self.pictures, self.labels)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step(self.pictures, self.labels)
            self.graph = graph

    def step(self, pictures: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        cross_entropy(self.model(pictures), labels).backward()
        self.optimizer.step()

    def train(self, start: list[Tensor], padded: Tensor, labels: Tensor, epochs: int) -> list[Tensor]:
        """The weights after local training from `start` on these rows."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, start, strict=True):
                parameter.copy_(value)
                if state := self.optimizer.state.get(parameter):
                    state["momentum_buffer"].zero_()
        for _ in range(epochs):
            order = torch.randperm(len(labels), device=self.device)
            batches = cropped(padded[order]).split(BATCH)
            for pictures, own in zip(batches, labels[order].split(BATCH), strict=True):
                if self.graph is not None and len(own) == BATCH:
                    self.pictures.copy_(pictures)
                    self.labels.copy_(own)
                    self.graph.replay()
                else:
                    self.step(pictures, own)
        return [parameter.detach().clone() for parameter in self.parameters]


def cropped(padded: Tensor) -> Tensor:
    """Random crops and flips of padded pictures, in 0..1."""
    count, channels, side = len(padded), padded.shape[1], padded.shape[2] - 2 * PAD
    each, channel, along = (torch.arange(n, device=padded.device) for n in (count, channels, side))
    down, right = torch.randint(2 * PAD + 1, (2, count, 1), device=padded.device)
    flip = torch.rand(count, 1, device=padded.device) < 0.5
    rows, columns = down + along, right + torch.where(flip, side - 1 - along, along)
    at = (
        each[:, None, None, None],
        channel[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    )
    return padded[at].float() / 255


def federate(
    folder: Path, seed: int, device: torch.device, rounds: int = 50, epochs: int = 10
) -> Iterator[float]:
    """The global model's test accuracy after each round."""
    pictures, labels = read_split(folder, "train")
    edges = ((0, 0), (0, 0), (PAD, PAD), (PAD, PAD))
    padded = torch.from_numpy(np.pad(pictures, edges, mode="reflect")).to(device)
    targets = torch.from_numpy(labels).to(device)
    test, answers = (torch.from_numpy(part).to(device) for part in read_split(folder, "test"))
    clients = [torch.tensor(rows, device=device) for rows in label_skew(labels, seed)]
    torch.manual_seed(seed)
    model = network().to(device)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    client = Client(model, device)
    for _ in range(rounds):
        total = [torch.zeros_like(value) for value in weights]
        for rows in clients:
            trained = client.train(weights, padded[rows], targets[rows], epochs)
            for value, own in zip(total, trained, strict=True):
                value.add_(own, alpha=len(rows) / len(labels))
        weights = total
        with torch.no_grad():
            for parameter, value in zip(client.parameters, weights, strict=True):
                parameter.copy_(value)
            said = torch.cat([model(part.float() / 255).argmax(1) for part in test.split(2000)])
        yield float((said == answers).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="NIID-Bench's FedAvg as a plain torch loop.")
    parser.add_argument("--data", type=Path, required=True, dest="folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default="cpu")
    for name, default in (("--rounds", 50), ("--epochs", 10)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    for number, accuracy in enumerate(federate(**vars(options)), start=1):
        print(json.dumps({"round": number, "test_accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    main()
