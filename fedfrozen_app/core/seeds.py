"""Separate random generators for every purpose, all derived from the run's seed.

Drawing batches never shifts the cohorts, and a client's stream depends on its name and the round, not on
which clients ran before: so every runtime and a resumed run repeat the same draws.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_for(seed: int, purpose: str, *keys: int | str) -> int:
    """A 63-bit seed that depends on every argument."""
    text = "/".join([str(seed), purpose, *map(str, keys)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def numpy_generator(seed: int, purpose: str, *keys: int | str) -> np.random.Generator:
    return np.random.default_rng(seed_for(seed, purpose, *keys))


def torch_generator(seed: int, purpose: str, *keys: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(seed_for(seed, purpose, *keys))


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The generators used by dropout on this device."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within the block dropout uses this seed; afterwards the generators are restored.

    Not `torch.manual_seed`: without a GPU it queues a call and a stack trace for the day one appears.
    """
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
