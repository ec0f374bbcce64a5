"""Drawn pictures of bright discs, each with its mask, as a folder or as NIfTI volumes."""

from pathlib import Path

import numpy as np
from PIL import Image


def disc(rng, side):
    y, x = np.mgrid[:side, :side]
    down, right = rng.integers(side // 4, 3 * side // 4, 2)
    inside = (y - down) ** 2 + (x - right) ** 2 <= rng.integers(side // 8, side // 4) ** 2
    picture = np.clip(rng.normal(90, 25, (side, side)) + 80 * inside, 0, 255).astype(np.uint8)
    return picture, inside


def draw(
    folder: Path, count: int = 12, side: int = 16, sites: tuple[str, ...] = ("",), seed: int = 0
) -> Path:
    rng = np.random.default_rng(seed)
    for number, site in enumerate(sites):
        for name in ("images", "masks"):
            (folder / site / name).mkdir(parents=True)
        for row in range(count - 3 * number):  # sites of unlike sizes
            picture, inside = disc(rng, side)
            Image.fromarray(picture).save(folder / site / "images" / f"{row:02}.png")
            Image.fromarray(inside.astype(np.uint8) * 255).save(
                folder / site / "masks" / f"{row:02}_mask.png"
            )
    return folder
