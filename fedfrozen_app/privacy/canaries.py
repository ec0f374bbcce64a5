"""Canaries: made-up examples for an audit of differential privacy.

Each is planted by a coin toss and then sampled, clipped and noised as rows are. A canary's gradient is
LENGTH times the clipping bound, along one element of one trained array, a different one for each canary. So
canaries do not interfere with each other, need no data, and each moves the sum by as much as an example ever
may: no others have more power (Nasr et al. 2023, arXiv 2302.07956, call them Dirac canaries).

    CLIENT/canaries.safetensors    where they are, and the coins
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.files.seal import read_arrays, save_arrays
from fedfrozen_app.privacy.keystream import Keystream

LENGTH = 10.0  # of a canary's gradient before it is clipped, in units of the bound
CANARIES = "canaries.safetensors"


@dataclass(frozen=True)
class Canaries:
    coins: np.ndarray  # (canaries,) bool: whether it was planted
    names: tuple[str, ...]
    places: np.ndarray  # (canaries, 2): index of the array's name, index of the element

    @classmethod
    def draw(cls, parameters: Mapping[str, Tensor], count: int) -> "Canaries":
        sizes = [value.numel() for value in parameters.values()]
        if count > sum(sizes):
            raise UserError(
                f"privacy.canaries={count} is more than the {sum(sizes)} elements that are trained, and each "
                "canary needs one of its own: set fewer."
            )
        stream = Keystream()
        elements = np.argsort(stream.words(sum(sizes)))[:count]
        ends = np.cumsum(sizes)
        arrays = np.searchsorted(ends, elements, side="right")
        places = np.stack([arrays, elements - (ends - sizes)[arrays]], axis=1)
        return cls(stream.uniform(count) < 0.5, tuple(parameters), places)

    @classmethod
    def of_run(cls, folder: Path, parameters: Mapping[str, Tensor], count: int) -> "Canaries":
        """The canaries of earlier rounds; in the first round, new ones."""
        if (folder / CANARIES).exists():
            return cls.read(folder)
        folder.mkdir(parents=True, exist_ok=True)
        drawn = cls.draw(parameters, count)
        tensors = {"coins": torch.from_numpy(drawn.coins), "places": torch.from_numpy(drawn.places)}
        save_arrays(tensors, folder / CANARIES, {"names": json.dumps(drawn.names)})
        return drawn

    @classmethod
    def read(cls, folder: Path) -> "Canaries":
        arrays, metadata = read_arrays(folder / CANARIES)
        try:
            return cls(arrays["coins"], tuple(json.loads(metadata["names"])), arrays["places"])
        except DAMAGED as error:
            path = folder / CANARIES
            raise UserError(f"{path} is no record of canaries: bring it back from a copy.") from error

    def __len__(self) -> int:
        return len(self.coins)

    def units(self, first_row: int) -> list[np.ndarray]:
        """The planted ones as units of privacy: canary n is called row `first_row` + n."""
        return [np.array([first_row + number]) for number in np.flatnonzero(self.coins)]

    def elements(self, parameters: Mapping[str, Tensor]) -> np.ndarray:
        """Each canary's position among all elements of these arrays laid end to end; -1 where there is
        none."""
        starts = dict(
            zip(parameters, np.cumsum([0, *(value.numel() for value in parameters.values())]), strict=False)
        )
        start = np.array([starts.get(name, -1) for name in self.names], dtype=np.int64)[self.places[:, 0]]
        return np.where(start < 0, -1, start + self.places[:, 1])
