"""A digest of the source code, independent of installation and packing, which a site's policy can require."""

import hashlib
import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

MOST_BYTES = 100_000_000  # of a bundle's files, unpacked
# The files of a bundle, as in fab-include of pyproject.toml.
SOURCES = (
    "fedfrozen_app/**/*.py",
    "fedfrozen_app/report/page_assets.json",
    "strategies/**/*.py",
    "clients/**/*.py",
    "conf/**/*.yaml",
)


def source_digest(app: Path) -> str:
    """Digest of the sources that Flower would bundle from this folder."""
    return digest_of_sources(
        {
            path.relative_to(app).as_posix(): path.read_bytes()
            for pattern in SOURCES
            for path in app.glob(pattern)
        }
    )


def bundle_digest(content: bytes) -> str:
    """The same digest for a bundle of these sources, independent of how it was packed.

    Bundles are untrusted: if one is not an archive, or too large, its bytes are hashed.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            files = {info.filename: info for info in bundle.infolist() if not info.is_dir()}
            whole = len(files) == sum(not info.is_dir() for info in bundle.infolist())  # no name twice
            if whole and sum(info.file_size for info in files.values()) <= MOST_BYTES:
                own = (name for name in files if not name.startswith(".info/"))  # Flower's list of files
                return digest_of_sources({name: bundle.read(name) for name in own})
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError):
        pass  # no archive, a damaged or an encrypted one
    return hashlib.sha256(content).hexdigest()


def digest_of_sources(files: Mapping[str, bytes]) -> str:
    """Digest of names and contents, sorted by name.

    Excludes `pyproject.toml`, which differs in a checkout and is missing in a wheel.
    """
    whole = hashlib.sha256()
    for name in sorted(set(files) - {"pyproject.toml"}):
        whole.update(f"{name}\0{hashlib.sha256(files[name]).hexdigest()}\n".encode())
    return whole.hexdigest()
