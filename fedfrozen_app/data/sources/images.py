"""Folders of pictures, and pictures as tensors."""

from __future__ import annotations

import io
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.account import places, warn
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, Rows, existing, first_line

logger = logging.getLogger(__name__)
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}

SMALL_IMAGE = 32 * 32  # pixels


def read_images(spec: DatasetSpec) -> Found:
    """An image folder: [split/][domain/]class/file."""
    root = existing(spec)
    if not root.is_dir():
        raise UserError(f"dataset.path={spec.path} is a file: an image data set is a folder.")
    if not (root / spec.train_split).is_dir():
        if (root / spec.test_split).is_dir():
            raise UserError(
                f"{root} has a folder {spec.test_split!r} but no {spec.train_split!r}: "
                "set dataset.train_split to the name of the train folder, or "
                f"dataset.path={root / spec.test_split} to use these alone."
            )
        return Found("image", _named(_image_tree(root), root), None)
    train, test = _named(_image_tree(root / spec.train_split), root), None
    if (root / spec.test_split).is_dir():
        test = _named(_image_tree(root / spec.test_split), root)
    return Found("image", train, test)


def _named(rows: Rows, root: Path) -> Rows:
    """With the names for numbered class folders that Flowers-102 brings: {"21": "fire lily", ...}."""
    path = root / "cat_to_name.json"
    if not path.is_file():
        return rows
    try:
        names = json.loads(path.read_text("utf-8"))
    except ValueError:
        names = None
    if not isinstance(names, dict):
        raise UserError(f"{path} is no JSON object of folder and class names: mend it or move it away.")
    for folder in sorted(set(rows.labels)):
        if not isinstance(names.get(folder), str):
            raise UserError(f"{path} has no name for the folder {folder}: add it, or move the file away.")
    return replace(rows, labels=[names[folder] for folder in rows.labels])


def _image_tree(root: Path) -> Rows:
    """Images under class/ or domain/class/, whichever the folder turns out to have."""
    tops = subfolders(root)
    classes = [(None, folder) for folder in tops if image_files(folder)]
    domains = [(top, folder) for top in tops for folder in _class_folders(top)]
    if classes and domains:
        raise UserError(
            f"{root} mixes two layouts: {classes[0][1].name} holds images, {domains[0][0].name} "
            "holds folders of images; use either class/image or domain/class/image throughout."
        )
    if not classes and not domains:
        raise UserError(
            f"No images found in {root}: expected class/image, domain/class/image, or these below "
            "a train and a test folder (dataset.train_split, dataset.test_split)."
        )
    layout = "domain/class" if domains else "class"
    logger.info("%s: image folder with layout %s/image", root, layout)

    rows = Rows([], [], {"domain": []} if domains else {}, [])
    for domain, folder in domains or classes:
        files = image_files(folder)
        rows.content += files
        rows.labels += [folder.name] * len(files)
        rows.origins += [str(file) for file in files]
        if domain is not None:
            rows.columns["domain"] += [domain.name] * len(files)
    _warn_of_others(root, set(rows.origins))
    return rows


def _warn_of_others(root: Path, read: set[str]) -> None:
    """Files that look like pictures or lie in a class's folder, and are not read."""
    folders = {Path(file).parent for file in read}
    others = [
        path
        for path in sorted(root.rglob("*"))
        if str(path) not in read
        and not any(part[0] in "._" for part in path.relative_to(root).parts)
        and path.is_file()
        and (path.suffix.lower() in IMAGE_SUFFIXES or path.parent in folders)
    ]
    if others:
        named = places([path.relative_to(root).as_posix() for path in others])
        warn(
            f"{root}: {counted(len(others), 'file')} {'is' if len(others) == 1 else 'are'} not read: {named}."
        )


def _class_folders(domain: Path) -> list[Path]:
    folders = subfolders(domain)
    # Office-31 has one more folder on the way: amazon/images/backpack/frame_0001.jpg.
    if [folder.name for folder in folders] == ["images"] and not image_files(folders[0]):
        folders = subfolders(folders[0])
    return [folder for folder in folders if image_files(folder)]


def subfolders(folder: Path) -> list[Path]:
    # Hidden folders and macOS' __MACOSX hold no data.
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] not in "._")


def image_files(folder: Path) -> list[Path]:
    return sorted(
        entry
        for entry in folder.iterdir()
        if entry.suffix.lower() in IMAGE_SUFFIXES and not entry.name.startswith(".")
    )


def decode_images(
    train: Rows, test: Rows, spec: DatasetSpec
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    if spec.image_size is not None:
        size = (spec.image_size, spec.image_size)
    else:
        size = open_image(train.content[0], train.origins[0]).size
    pixels, grey = _decode(train, size, spec)
    test_pixels, test_grey = _decode(test, size, spec)
    if spec.channels is None and grey and test_grey:
        pixels, test_pixels = pixels[:, :1].copy(), test_pixels[:, :1].copy()
    return (
        {"pixel_values": torch.from_numpy(pixels)},
        {"pixel_values": torch.from_numpy(test_pixels)},
    )


def _decode(rows: Rows, size: tuple[int, int], spec: DatasetSpec) -> tuple[np.ndarray, bool]:
    """All images as one array (n, c, h, w), and whether every one of them was grey."""
    count, (width, height) = len(rows.content), size
    channels = spec.channels or 3
    if count and all(_is_decoded(item, (height, width)) for item in rows.content):
        return np.repeat(np.stack(rows.content)[:, None], channels, axis=1), True
    pixels = np.empty((count, channels, height, width), dtype=np.uint8)
    grey = np.empty(count, dtype=bool)

    def work(chunk: np.ndarray) -> None:
        for row in chunk:
            image = open_image(rows.content[row], rows.origins[row])
            grey[row] = image.mode == "L"
            wanted = "L" if channels == 1 else "RGB"
            if image.mode != wanted:
                image = image.convert(wanted)
            if image.size != size:
                if spec.image_size is None:
                    raise UserError(
                        f"{rows.origins[row]} is {image.width}x{image.height} pixels where others "
                        f"are {width}x{height}: set dataset.image_size to bring all to one size."
                    )
                image = image.resize(size, Image.Resampling.BICUBIC)
            array = np.asarray(image)  # (h, w) or (h, w, 3)
            pixels[row] = array if channels == 1 else array.transpose(2, 0, 1)

    # Threads help because Pillow decodes outside the interpreter lock, and chunks, because one task an
    # image would cost more than a small image itself; very small ones are done before the lock is free.
    small = spec.image_size is None and width * height <= SMALL_IMAGE
    workers = 1 if small else os.cpu_count() or 1
    chunks = np.array_split(np.arange(count), max(1, min(4 * workers, count)))
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(work, chunks):
            pass
    return pixels, bool(grey.all())


def _is_decoded(item: Any, shape: tuple[int, int]) -> bool:
    """Grey, of 8 bits and of this size, as an array: there is nothing to decode."""
    return isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.shape == shape


def open_image(item: Any, origin: str) -> Image.Image:
    """An image, loaded, with 8 bits a channel."""
    if isinstance(item, np.ndarray):
        return Image.fromarray(item)
    try:
        image = Image.open(io.BytesIO(item) if isinstance(item, bytes) else item)
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"Cannot read the image {origin} ({first_line(error)}).") from error
    return eight_bits(image, origin)


def eight_bits(image: Image.Image, origin: str) -> Image.Image:
    """With 8 bits a channel."""
    if image.mode.startswith("I"):
        # Pillow would clip 16-bit pixels, as radiographs have, to white.
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.mode == "F":
        raise UserError(f"The image {origin} has floating-point pixels: save it with 8 or 16 bits.")
    return image.convert("L") if image.mode in ("1", "LA") else image


def pixel_statistics(pixels: torch.Tensor, spec: DatasetSpec) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of pixels in 0..1, given or measured."""
    channels = pixels.shape[1]
    for option, given in (("mean", spec.mean), ("std", spec.std)):
        if given is not None and len(given) != channels:
            raise UserError(
                f"dataset.{option} has {len(given)} values but the images have {channels} channels."
            )
    if spec.std is not None and min(spec.std) <= 0:
        raise UserError(f"dataset.std={list(spec.std)} must be above 0 in every channel.")
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in range(channels):
        # Counting the 256 values is exact and needs no float copy of the pixels.
        shares = torch.bincount(pixels[:, channel].flatten(), minlength=256).double()
        shares /= shares.sum()
        mean = (shares * levels).sum()
        std = (shares * (levels - mean) ** 2).sum().sqrt()
        means.append(mean.item())
        stds.append(std.item() if std > 0 else 1.0)  # a blank channel: nothing to scale
    return tuple(spec.mean or means), tuple(spec.std or stds)
