"""Logistic regression on MNIST as a plain Flower app: the standard FedAvg, nothing of ours.

Fair to Flower: a worker reads the data once and keeps its model between messages.
"""

import json
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor
from torch.nn.functional import cross_entropy

client = ClientApp()
server = ServerApp()


@lru_cache(maxsize=1)
def loaded(path: str) -> dict[str, Tensor]:
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@lru_cache(maxsize=1)
def model() -> torch.nn.Linear:
    return torch.nn.Linear(784, 10)


def normalised(pixels: Tensor, data: dict[str, Tensor]) -> Tensor:
    return torch.addcmul(data["shift"], pixels.float(), data["scale"])


@client.train()
def train(message: Message, context: Context) -> Message:
    data, net = loaded(str(context.run_config["data"])), model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
    rows = data["rows"][int(context.node_config["partition-id"])]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03, fused=True)
    for index in rows[torch.randperm(len(rows))].split(10):
        optimizer.zero_grad()
        logits = net(normalised(data["pixels"][index], data))
        cross_entropy(logits, data["labels"][index]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(rows)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    rounds, every = int(settings["rounds"]), int(settings["eval-every"])
    data, net = loaded(str(settings["data"])), model()
    initial = {"weight": data["weight"].clone(), "bias": data["bias"].clone()}
    marks: list[float] = []
    accuracy: dict[int, float] = {}

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        """Flower calls this before the first round and after each."""
        if server_round % every == 0 or server_round == rounds:
            net.load_state_dict(arrays.to_torch_state_dict())
            with torch.inference_mode():
                guesses = net(normalised(data["test_pixels"], data)).argmax(dim=-1)
            accuracy[server_round] = (guesses == data["test_labels"]).double().mean().item()
        marks.append(time.perf_counter())

    nodes = len(data["rows"])
    strategy = FedAvg(
        fraction_train=float(settings["participation"]), fraction_evaluate=0.0, min_available_nodes=nodes
    )
    strategy.start(grid, ArrayRecord(initial), num_rounds=rounds, evaluate_fn=evaluate)
    result = {"marks": marks, "accuracy": accuracy[rounds]}
    Path(str(settings["result"])).write_text(json.dumps(result))
