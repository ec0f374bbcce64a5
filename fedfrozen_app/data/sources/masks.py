"""Pictures with a mask for each: [split/][site/]images/NAME and masks/NAME; volumes of NIfTI in the same way.

A mask has one value (0 to 255) for each class, and as many pixels as its picture. What is brought to
`dataset.image_size` is resized: a picture smoothly, a mask to the nearest value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.account import warn
from fedfrozen_app.data.sources.images import image_files, read_images, subfolders
from fedfrozen_app.data.sources.medical import (
    NIFTI,
    chosen_slices,
    greyed,
    needs_package,
    nifti_volume,
    patient_of,
    read_nifti,
    slice_of,
)
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, Rows, existing, first_line, reads
from fedfrozen_app.tasks.segmentation import Mask, mask_of

PICTURES, MASKS = "images", "masks"
MOST_VALUES = 32  # of one mask: more are the traces of a lossy or smoothed file
Pair = tuple[Any, Mask, str, str]  # content, mask, patient, origin
Read = Callable[[Path, Path, DatasetSpec], Iterator[Pair]]


@reads("classification", "segmentation")
def read_pictures(spec: DatasetSpec) -> Found:
    """Pictures with a class each, or with a mask."""
    return _found(spec, image_files, _picture) if spec.task == "segmentation" else read_images(spec)


@reads("classification", "segmentation")
def read_volumes(spec: DatasetSpec) -> Found:
    """The same of volumes: a row for each slice, and a person's slices are never parted."""
    if spec.task != "segmentation":
        return read_nifti(spec)
    needs_package("nibabel", "pictures")
    return _found(spec, _nifti_files, _volume, unit="patient")


def _found(
    spec: DatasetSpec, files: Callable[[Path], list[Path]], read: Read, unit: str | None = None
) -> Found:
    root = existing(spec)
    if not root.is_dir():
        raise UserError(f"dataset.path={spec.path} is a file: pictures with masks lie in a folder.")
    train, test = root / spec.train_split, root / spec.test_split
    if not train.is_dir():
        return Found("segmentation", _rows(root, spec, files, read, unit), None, unit=unit)
    tested = _rows(test, spec, files, read, unit) if test.is_dir() else None
    return Found("segmentation", _rows(train, spec, files, read, unit), tested, unit=unit)


def _rows(
    root: Path, spec: DatasetSpec, files: Callable[[Path], list[Path]], read: Read, unit: str | None
) -> Rows:
    sites = [None] if _has_both(root) else [site for site in subfolders(root) if _has_both(site)]
    if not sites:
        raise UserError(
            f"No pictures with masks found in {root}: expected {PICTURES}/NAME and {MASKS}/NAME there, in "
            f"each site's folder, or below {spec.train_split}/ and {spec.test_split}/."
        )
    rows = Rows([], [], {}, [])
    for site in sites:
        folder = root if site is None else site
        for picture, mask in _pairs(files(folder / PICTURES), files(folder / MASKS), folder):
            for content, own, patient, origin in read(picture, mask, spec):
                rows.content.append(content)
                rows.labels.append(own)
                rows.origins.append(origin)
                if unit is not None:
                    rows.columns.setdefault(unit, []).append(patient)
                if site is not None:
                    rows.columns.setdefault("domain", []).append(site.name)
    return rows


def _has_both(folder: Path) -> bool:
    return (folder / PICTURES).is_dir() and (folder / MASKS).is_dir()


def _pairs(pictures: list[Path], masks: list[Path], folder: Path) -> list[tuple[Path, Path]]:
    """By the name without its ending; a mask's may go on, as in 01.png and 01_mask.png."""
    found, left = [], {_stem(mask): mask for mask in masks}
    for picture in pictures:
        name = _stem(picture)
        fitting = [name] if name in left else [one for one in left if _extends(one, name)]
        if len(fitting) != 1:
            what = "has several masks" if fitting else "has no mask"
            raise UserError(
                f"{picture} {what}: put one file named {name} (with any ending) into {folder / MASKS}."
            )
        found.append((picture, left.pop(fitting[0])))
    if left:
        few = ", ".join(sorted(left)[:5])
        warn(f"{folder / MASKS}: {len(left)} masks without a picture are not read ({few}).")
    return found


def _extends(longer: str, name: str) -> bool:
    return longer.startswith(name) and not longer[len(name)].isalnum()


def _stem(file: Path) -> str:
    name = file.name.lower()
    return next((name.removesuffix(end) for end in reversed(NIFTI) if name.endswith(end)), Path(name).stem)


def _nifti_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name.lower().endswith(NIFTI))


def _picture(picture: Path, mask: Path, spec: DatasetSpec) -> Iterator[Pair]:
    try:
        with Image.open(picture) as opened:
            size = opened.size
        with Image.open(mask) as opened:
            opened.load()
            pixels = _values(opened, mask)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"Cannot read {picture} and its mask ({first_line(error)}).") from error
    yield picture, _checked(pixels, size, str(mask), str(picture), spec), "", str(picture)


def _values(mask: Image.Image, origin: Path) -> np.ndarray:
    """(height, width); of a palette the colours' numbers."""
    if mask.mode in ("L", "P"):
        return np.asarray(mask)
    if mask.mode == "1":
        return np.asarray(mask.convert("L"))
    pixels = np.asarray(mask)
    if pixels.ndim == 3:
        colours = pixels[:, :, :1] if mask.mode == "LA" else pixels[:, :, :3]
        if (colours != colours[:, :, :1]).any():
            raise UserError(f"The mask {origin} is in colour: save it grey, with one value for each class.")
        pixels = pixels[:, :, 0]
    return pixels


def _volume(picture: Path, mask: Path, spec: DatasetSpec) -> Iterator[Pair]:
    volume, classes = nifti_volume(picture), nifti_volume(mask)
    if volume.shape != classes.shape:
        raise UserError(
            f"The mask of {picture.parent.parent.name}/{picture.name} has {_times(classes.shape)} voxels, "
            f"and its volume {_times(volume.shape)}: resample one to the other's grid."
        )
    grey, patient = greyed(volume, spec), patient_of(picture)
    for number in chosen_slices(list(range(volume.shape[2])), spec.slices):
        origin = f"slice {number} of {picture.name}"
        flat = slice_of(grey[:, :, number])
        own = _checked(slice_of(classes[:, :, number]), flat.shape[::-1], origin, origin, spec)
        yield flat, own, patient, origin


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _checked(pixels: np.ndarray, size: tuple[int, int], origin: str, picture: str, spec: DatasetSpec) -> Mask:
    """`size`: width and height of the picture."""
    height, width = pixels.shape
    if (width, height) != size:
        raise UserError(
            f"The mask {origin} has {width}x{height} pixels, and its picture {picture} {size[0]}x{size[1]}: "
            "they must be of one size."
        )
    values = np.unique(pixels)
    if len(values) > MOST_VALUES:
        raise UserError(
            f"The mask {origin} has {len(values)} values, as a lossy or smoothed file has: save it without "
            f"loss (PNG), with one value for each class, at most {MOST_VALUES}."
        )
    if values[0] < 0 or values[-1] > 255 or (values % 1).any():
        raise UserError(
            f"The mask {origin} has values that are no whole numbers from 0 to 255: number the classes."
        )
    whole = Image.fromarray(pixels.astype(np.uint8))
    if spec.image_size is not None:
        whole = whole.resize((spec.image_size, spec.image_size), Image.Resampling.NEAREST)
    return mask_of(np.asarray(whole))
