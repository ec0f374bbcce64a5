"""The source of a private round's noise, samples and dropout: a secret keystream, or a seed in a simulation.

Noise is added in float64, and the sum is rounded to a multiple of a fixed step before it becomes a float32:
otherwise the low digits of a result near zero would reveal the sum without noise.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.core.seeds import numpy_generator, seed_for, seeded
from fedfrozen_app.privacy.keystream import Keystream, gaussians_of

MT_WORDS = slice(24, 24 + 624 * 8)  # of a torch generator's state on a CPU: those of its Mersenne twister
STEP_BITS = 20  # results are multiples of 2⁻²⁰ of the noise, which is drawn 2³² times finer


class Noise(ABC):
    """One client's randomness in one round."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @abstractmethod
    def poisson(self, size: int, rate: float) -> np.ndarray:
        """The positions of a Poisson sample: each of `size` is included independently with probability
        `rate`."""

    @abstractmethod
    def one_of(self, size: int) -> int:
        """A uniform integer below `size`."""

    @abstractmethod
    def standard(self, like: Tensor) -> Tensor:
        """Gaussian noise of this tensor's shape, with variance 1."""

    @staticmethod
    def standards(
        sources: "Sequence[Noise]", like: Tensor, workers: Executor | None = None, threads: int = 1
    ) -> Tensor:
        """`standard` of each source, (sources, *shape); the sources are of one class. Uses `threads` of
        `workers`."""
        return torch.stack([source.standard(like) for source in sources])

    def another(self) -> "Noise | None":
        """An interchangeable source, to draw in parallel; None if the noise must come from this one, in
        order."""
        return None

    @staticmethod
    @abstractmethod
    def with_drawn(value: Tensor, drawn: Tensor, std: Tensor) -> Tensor:
        """`value` plus `std` times the noise that `standard` has drawn for it. `std` is a number in float64,
        or (sources, 1) of them for `standards`. `drawn` is overwritten."""

    def added_to(self, value: Tensor, std: float) -> Tensor:
        """`value` with Gaussian noise on every element."""
        if std == 0:
            return value
        return self.with_drawn(value, self.standard(value), torch.tensor(std, dtype=torch.float64))

    @abstractmethod
    def _dropout_words(self) -> tuple[int, np.ndarray]:
        """A seed of 63 bits, and (624,) words of 32 bits."""

    @contextmanager
    def dropout(self) -> Iterator[None]:
        """A context in which dropout draws from this source.

        A row's mask depends on its place in the sample, so one additional row changes the masks of all rows
        after it. Clipping bounds the effect only if all masks are equally likely to the observer. torch's
        generators are not cryptographic: on a CPU all 19,937 bits of its state are secret, on a GPU 63.
        """
        seed, words = self._dropout_words()
        with seeded(seed, self._device):
            state = torch.default_generator.get_state().numpy()
            state[MT_WORDS].view(np.uint64)[:] = words
            torch.default_generator.set_state(torch.from_numpy(state))
            yield


class SecretNoise(Noise):
    """Noise from a key that the operating system draws and that is never stored."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = Keystream()
        self._lanes: list[Keystream] = []

    def poisson(self, size: int, rate: float) -> np.ndarray:
        return np.flatnonzero(self._stream.uniform(size) < rate)

    def one_of(self, size: int) -> int:
        return self._stream.below(size)

    def standard(self, like: Tensor) -> Tensor:
        return self._stream.gaussians(like.numel(), like.device).view(like.shape)

    @staticmethod
    def standards(
        sources: Sequence[Noise], like: Tensor, workers: Executor | None = None, threads: int = 1
    ) -> Tensor:
        each, size = max(1, threads // len(sources)), like.numel()
        streams = [lane for source in sources for lane in cast(SecretNoise, source)._first_lanes(each)]
        drawn = gaussians_of(streams, -(-size // each), like.device, workers)
        return drawn.view(len(sources), -1)[:, :size].view(-1, *like.shape)

    def another(self) -> "SecretNoise":
        return SecretNoise(self._device)

    def _first_lanes(self, count: int) -> list[Keystream]:
        """Streams with separate keys, one for each thread."""
        self._lanes += [Keystream() for _ in range(count - len(self._lanes))]
        return self._lanes[:count]

    @staticmethod
    def with_drawn(value: Tensor, drawn: Tensor, std: Tensor) -> Tensor:
        # A power of two, so that multiplying by it does not round.
        step = std / torch.frexp(std).mantissa * 2.0 ** -(STEP_BITS + 1)
        noisy = drawn.mul_(std / step)
        return noisy.add_(value * (1 / step)).round_().mul_(step).to(value.dtype)

    def _dropout_words(self) -> tuple[int, np.ndarray]:
        words = self._stream.words(625)
        return int(words[0]) >> 1, words[1:] >> np.uint64(32)


class SeededNoise(Noise):
    """Noise from a known seed: for simulation, not secret."""

    def __init__(self, device: torch.device, seed: int, client: str, server_round: int) -> None:
        super().__init__(device)
        self._numpy = numpy_generator(seed, "privacy", client, server_round)
        self._torch: torch.Generator | None = None
        if device.type == "cuda":
            bits = seed_for(seed, "privacy noise", client, server_round)
            self._torch = torch.Generator(device).manual_seed(bits)

    def poisson(self, size: int, rate: float) -> np.ndarray:
        return np.flatnonzero(self._numpy.random(size) < rate)

    def one_of(self, size: int) -> int:
        return int(self._numpy.integers(size))

    def standard(self, like: Tensor) -> Tensor:
        if self._torch is not None:
            return torch.randn(like.shape, generator=self._torch, device=like.device, dtype=like.dtype)
        return torch.from_numpy(self._numpy.standard_normal(tuple(like.shape)))

    @staticmethod
    def with_drawn(value: Tensor, drawn: Tensor, std: Tensor) -> Tensor:
        return value + (drawn * std.to(drawn.dtype)).to(value)

    def _dropout_words(self) -> tuple[int, np.ndarray]:
        seed = int(self._numpy.integers(2**63))
        return seed, self._numpy.integers(2**32, size=624, dtype=np.uint64)
