"""Packages of somebody else's for tests: a wheel made of texts, installed by pip without a network."""

import base64
import hashlib
import importlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedfrozen_app.core import registry


def make_wheel(
    folder: Path, name: str, files: Mapping[str, str], entry_points: Mapping[str, Mapping[str, str]]
) -> Path:
    """`entry_points` by group and name, as pyproject.toml has them."""
    told = f"{name}-1.0.dist-info"
    sections = (
        f"[{group}]\n" + "".join(f"{key} = {place}\n" for key, place in own.items())
        for group, own in entry_points.items()
    )
    whole = {
        **files,
        f"{told}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{told}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
        f"{told}/entry_points.txt": "\n".join(sections),
    }
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        record = []
        for path, text in whole.items():
            archive.writestr(path, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(text.encode())}\n")
        archive.writestr(f"{told}/RECORD", "".join(record))
    return wheel


@contextmanager
def on_path(site: Path, package: str) -> Iterator[Path]:
    """Within it this process finds the package that was installed there."""
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    registry.places.cache_clear()
    try:
        yield site
    finally:
        sys.path.remove(str(site))
        registry.places.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


def install(wheel: Path, target: Path) -> Path:
    """Into a folder that then only has to be on Python's path."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--disable-pip-version-check", "--target", str(target), str(wheel)], check=True)
    return target
