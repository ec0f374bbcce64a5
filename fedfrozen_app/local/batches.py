"""The batches of a client's local steps, drawn by the client's own random generator."""

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.config import ClientConfig
from fedfrozen_app.core.seeds import torch_generator
from fedfrozen_app.data.augment import with_codes
from fedfrozen_app.local.client_data import ClientData


def drawn_examples(
    data: ClientData,
    client: str,
    server_round: int,
    phase: int,
    epochs: int | None,
    most: int | None = None,
) -> tuple[Tensor, list[int]]:
    """The arguments of `ClientData.take` for all steps of a phase (row numbers and their images'
    augmentation), and the batch size of each step. `most`: the maximum number of steps."""
    config = data.config
    rows = data.rows(client).train
    drawn, sizes = drawn_rows(rows, config.client, config.seed, client, server_round, phase, epochs, most)
    if data.augments:  # from a separate generator, so that the rows are the same as without augmentation
        generator = torch_generator(config.seed, "augment", client, server_round, phase)
        drawn = with_codes(drawn, len(data.train_table), generator)
    return drawn, sizes


def drawn_rows(
    rows: Tensor,
    settings: ClientConfig,
    seed: int,
    client: str,
    server_round: int,
    phase: int = 0,
    epochs: int | None = None,
    most: int | None = None,
) -> tuple[Tensor, list[int]]:
    """The row numbers of all steps, shuffled in every epoch, and the batch size of each step. `epochs`: of
    the phase, if it sets its own number; `most`: the maximum number of steps of this client."""
    later = (phase,) if phase else ()  # the first phase draws the same as a round without phases
    generator = torch_generator(seed, "batches", client, server_round, *later)
    times = settings.local_epochs if epochs is None else epochs
    numbers, count = rows.numpy(), rows.numel()  # numpy indexes faster for many small clients
    orders = [numbers[torch.randperm(count, generator=generator).numpy()] for _ in range(times)]
    whole, rest = divmod(count, settings.batch_size)
    sizes = ([settings.batch_size] * whole + [rest] * (rest > 0)) * times
    sizes = sizes[: settings.local_steps][:most]
    drawn = np.concatenate(orders) if times > 1 else orders[0]
    return torch.from_numpy(drawn[: sum(sizes)]), sizes


def batches(rows: Tensor, settings: ClientConfig, seed: int, client: str, server_round: int) -> list[Tensor]:
    """The row numbers of each step."""
    drawn, sizes = drawn_rows(rows, settings, seed, client, server_round)
    return list(drawn.split(sizes))
