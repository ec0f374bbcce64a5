"""Feature shift by noise: client i of N sees pictures with Gaussian noise of standard deviation σ·i/N.

NIID-Bench's noise-based feature imbalance (Li et al. 2022), in units of the pixels' range; rounded and
clipped to bytes. Train rows alone are noised: every client is evaluated on the test rows as they are.
"""

import numpy as np
import torch

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.seeds import torch_generator
from fedfrozen_app.data.partition_spec import Partition
from fedfrozen_app.data.table import Table


def with_noise(table: Table, parts: Partition | None, sigma: float, seed: int) -> Table:
    """The table with every client's noise in its rows; itself where there is none."""
    if not sigma or parts is None:
        return table
    pixels = table.inputs.get("pixel_values")
    if pixels is None or pixels.dtype != torch.uint8:
        raise UserError(
            f"partition.noise={sigma:g} adds noise to pictures, and these data are none: set it to 0."
        )
    noised = pixels.clone()
    for number, rows in enumerate(parts.indices):
        index = torch.from_numpy(np.asarray(rows))
        drawn = torch.randn(
            pixels[index].shape, generator=torch_generator(seed, "feature noise", str(number))
        )
        spread = 255 * sigma * (number + 1) / len(parts.indices)
        noised[index] = (pixels[index] + spread * drawn).round().clamp(0, 255).to(torch.uint8)
    return Table({**table.inputs, "pixel_values": noised}, table.labels)
