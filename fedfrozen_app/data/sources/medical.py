"""DICOM and NIfTI as pictures: CLASS/**/file below the folder, a picture for each slice.

Nothing of a header is kept but what makes the picture. Whose a slice is becomes a pseudonym, by which rows of
one patient are never parted; it stays on this machine. Needs pydicom or nibabel: pip install
"fedfrozen[pictures]".
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, Rows, existing, first_line

Slices = Callable[[Path, DatasetSpec], Iterator[tuple[str, str, float, np.ndarray]]]
NIFTI = (".nii", ".nii.gz")
TAILS = (0.5, 99.5)  # percent: what is darker or brighter is cut off where no window is given


def read_dicom(spec: DatasetSpec) -> Found:
    """Every file below a class's folder that is DICOM, whatever it is called."""
    needs_package("pydicom", "pictures")
    return _read(spec, _dicom_slices, lambda path: path.suffix.lower() in (".dcm", ".dicom", ".ima", ""))


def read_nifti(spec: DatasetSpec) -> Found:
    """Every .nii and .nii.gz below a class's folder, cut along its last axis."""
    needs_package("nibabel", "pictures")
    return _read(spec, _nifti_slices, lambda path: path.name.lower().endswith(NIFTI))


def _read(spec: DatasetSpec, slices: Slices, belongs: Callable[[Path], bool]) -> Found:
    root = existing(spec)
    if (root / spec.train_split).is_dir():
        test = root / spec.test_split
        rows = _rows(root / spec.train_split, spec, slices, belongs)
        return Found(
            "image", rows, _rows(test, spec, slices, belongs) if test.is_dir() else None, unit="patient"
        )
    return Found("image", _rows(root, spec, slices, belongs), None, unit="patient")


def _rows(root: Path, spec: DatasetSpec, slices: Slices, belongs: Callable[[Path], bool]) -> Rows:
    rows = Rows([], [], {"patient": [], "series": []}, [])
    for folder in sorted(entry for entry in root.iterdir() if entry.is_dir() and entry.name[0] not in "._"):
        series: dict[str, list[tuple[float, str, np.ndarray]]] = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and belongs(path)):
            for patient, name, place, picture in slices(path, spec):
                series.setdefault(name, []).append((place, patient, picture))
        for number, (name, found) in enumerate(series.items()):
            found.sort(key=lambda one: one[0])
            for place, patient, picture in chosen_slices(found, spec.slices):
                rows.content.append(picture)
                rows.labels.append(folder.name)
                rows.columns["patient"].append(patient)
                rows.columns["series"].append(name)
                rows.origins.append(f"slice {place:g} of series {number} of {folder.name}")
    if not rows.content:
        raise UserError(f"No picture found in {root}: expected CLASS/file, of the kind {spec.kind}.")
    return rows


def chosen_slices(found: list[Any], count: int | None) -> list[Any]:
    """So many slices of a series, evenly from its middle part; all of them where no number is given."""
    if count is None or count >= len(found):
        return found
    return [found[int((number + 0.5) * len(found) / count)] for number in range(count)]


def _dicom_slices(path: Path, spec: DatasetSpec) -> Iterator[tuple[str, str, float, np.ndarray]]:
    import pydicom
    from pydicom.errors import InvalidDicomError
    from pydicom.pixels import apply_modality_lut

    try:
        file = pydicom.dcmread(path)
    except InvalidDicomError:
        return  # something else that lies there
    if "PixelData" not in file:
        return  # a report, or a directory of files
    try:
        values = apply_modality_lut(file.pixel_array, file).astype(np.float64)
        low, high = (
            _own_window(file) if spec.window is None and "WindowWidth" in file else _window(values, spec)
        )
    except (AttributeError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(
            f"A DICOM file of {path.parent.name} has pixels that cannot be read ({first_line(error)}): leave "
            "it out, or install a decoder for it."
        ) from error
    picture = _grey(values, low, high)
    if file.get("PhotometricInterpretation") == "MONOCHROME1":  # white is zero
        picture = 255 - picture
    colours = int(file.get("SamplesPerPixel", 1)) > 1
    frames = picture if picture.ndim == (4 if colours else 3) else picture[None]
    patient = pseudonym(str(file.get("PatientID", "") or file.get("StudyInstanceUID", "") or path))
    name = pseudonym(str(file.get("SeriesInstanceUID", "") or path.parent))
    first = float(file.get("InstanceNumber", 0) or 0)
    for number, frame in enumerate(frames):
        yield patient, name, first + number, frame


def _nifti_slices(path: Path, spec: DatasetSpec) -> Iterator[tuple[str, str, float, np.ndarray]]:
    volume = nifti_volume(path)
    grey = greyed(volume, spec)
    for number in range(volume.shape[2]):
        yield patient_of(path), pseudonym(str(path)), float(number), slice_of(grey[:, :, number])


def nifti_volume(path: Path) -> np.ndarray:
    """(columns, rows, slices)"""
    import nibabel

    try:
        volume = np.asarray(nibabel.load(path).dataobj, dtype=np.float64)  # type: ignore[attr-defined]
    except (nibabel.filebasedimages.ImageFileError, OSError, EOFError, ValueError) as error:
        raise UserError(
            f"A NIfTI file of {path.parent.name} cannot be read ({first_line(error)})."
        ) from error
    volume = volume[..., 0] if volume.ndim == 4 else volume  # of a series in time, its first
    return volume if volume.ndim == 3 else volume.reshape(*volume.shape[:2], -1)


def slice_of(values: np.ndarray) -> np.ndarray:
    """Columns of a NIfTI run from left to right: turned, so that up is up."""
    return np.rot90(values)


def patient_of(path: Path) -> str:
    """BIDS names the person first: sub-01_ses-2_T1w.nii.gz."""
    person = re.match(r"sub-[A-Za-z0-9]+", path.name)
    return pseudonym(person.group() if person else path.name)


def greyed(volume: np.ndarray, spec: DatasetSpec) -> np.ndarray:
    """A volume's values as 0 to 255, within the window."""
    return _grey(volume, *_window(volume, spec))


def _window(values: np.ndarray, spec: DatasetSpec) -> tuple[float, float]:
    if spec.window is not None:
        return _ends(*spec.window)
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, TAILS) if finite.size else (0.0, 1.0)
    return float(low), float(high)


def _own_window(file: Any) -> tuple[float, float]:
    """As the file declares, the first where it has several (DICOM PS3.3 C.11.2.1.2)."""
    centre, width = (
        float(value[0] if isinstance(value, (list, tuple)) or hasattr(value, "append") else value)
        for value in (file.WindowCenter, file.WindowWidth)
    )
    return centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2


def _ends(centre: float, width: float) -> tuple[float, float]:
    return centre - width / 2, centre + width / 2


def _grey(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """0 to 255 within the window, cut off beyond."""
    span = high - low if high > low else 1.0
    return np.clip(np.nan_to_num((values - low) / span) * 255, 0, 255).round().astype(np.uint8)


def pseudonym(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=b"fedfrozen", digest_size=8).hexdigest()


def needs_package(package: str, extra: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise UserError(f'These data need {package}: pip install "fedfrozen[{extra}]".') from error
