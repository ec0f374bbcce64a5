"""A model to every client and back as a plain Flower app: the standard FedAvg, no training."""

import json
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    state = message.content["arrays"].to_torch_state_dict()  # type: ignore[union-attr]
    arrays = ArrayRecord({name: tensor + 1 for name, tensor in state.items()})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


class TimedFedAvg(FedAvg):
    """Flower's FedAvg, noting how long its aggregation takes."""

    aggregating: list[float]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        began = time.perf_counter()
        found = super().aggregate_train(server_round, replies)
        self.aggregating.append(time.perf_counter() - began)
        return found


@server.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    sizes = json.loads(str(settings["sizes"]))
    clients, rounds = int(settings["clients"]), int(settings["rounds"])
    marks: list[float] = []

    def mark(server_round: int, arrays: ArrayRecord) -> None:
        """Flower calls this before the first round and after each."""
        marks.append(time.perf_counter())

    strategy = TimedFedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    strategy.aggregating = []
    initial = ArrayRecord({f"array{number}": torch.zeros(size) for number, size in enumerate(sizes)})
    result = strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=mark)
    last = next(iter(result.arrays.to_torch_state_dict().values()))
    assert torch.allclose(last, torch.tensor(float(rounds))), "an echo went missing"
    text = json.dumps({"marks": marks, "aggregate": strategy.aggregating})
    Path(str(settings["result"])).write_text(text)
