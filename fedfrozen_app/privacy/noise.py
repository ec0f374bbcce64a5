"""Where noise, samples and dropout come from: the operating system, unless a simulation asks for its seed.

A torch generator on a CPU takes 32 bits of its seed, few enough to try them all, so noise on a CPU comes from
numpy, which takes 128 bits from the operating system; on a GPU torch's own generator takes 63.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.seeds import numpy_generator, seed_for, seeded

MT_WORDS = slice(24, 24 + 624 * 8)  # of a torch generator's state on a CPU: those of its Mersenne twister


class Noise:
    """One client's randomness in one round. With a seed it is no secret: for simulation."""

    def __init__(self, device: torch.device, seed: tuple[int, str, int] | None = None) -> None:
        """`seed`: the run's seed, the client, the round; None: the operating system."""
        self._numpy = (
            np.random.default_rng() if seed is None else numpy_generator(seed[0], "privacy", *seed[1:])
        )
        self._device = device
        self._torch: torch.Generator | None = None
        if device.type == "cuda":
            bits = secrets.randbits(63) if seed is None else seed_for(seed[0], "privacy noise", *seed[1:])
            self._torch = torch.Generator(device).manual_seed(bits)

    def poisson(self, size: int, rate: float) -> np.ndarray:
        """The positions of a sample in which each of `size` is present on its own with chance `rate`."""
        return np.flatnonzero(self._numpy.random(size) < rate)

    def one_of(self, size: int) -> int:
        return int(self._numpy.integers(size))

    def normal(self, like: Tensor, std: float) -> Tensor:
        """Gaussian noise of the shape and type of `like`."""
        if std == 0:
            return torch.zeros_like(like)
        if self._torch is not None:
            return torch.normal(
                0.0, std, like.shape, generator=self._torch, device=like.device, dtype=like.dtype
            )
        return torch.from_numpy(self._numpy.standard_normal(tuple(like.shape)) * std).to(like)

    @contextmanager
    def dropout(self) -> Iterator[None]:
        """Within the block dropout draws from this source.

        A row's mask goes by its place in the sample, so one row more gives all behind it other masks.
        Clipping bounds what that changes only for somebody to whom all masks are equally likely.
        """
        with seeded(int(self._numpy.integers(2**63)), self._device):
            state = torch.default_generator.get_state().numpy()
            state[MT_WORDS].view(np.uint64)[:] = self._numpy.integers(2**32, size=624, dtype=np.uint64)
            torch.default_generator.set_state(torch.from_numpy(state))
            yield
