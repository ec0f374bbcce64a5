"""One digest for one source, however it was installed or packed: what a site's policy can insist on."""

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
    """Of the sources that Flower would bundle from this folder."""
    return digest_of_sources(
        {
            path.relative_to(app).as_posix(): path.read_bytes()
            for pattern in SOURCES
            for path in app.glob(pattern)
        }
    )


def bundle_digest(content: bytes) -> str:
    """The same of a bundle that was made of them: what it was packed from, not how.

    Somebody else made it: of one that is no archive, or too large a one, the digest is of its bytes.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            files = {info.filename: info for info in bundle.infolist() if not info.is_dir()}
            whole = len(files) == sum(not info.is_dir() for info in bundle.infolist())  # no name twice
            if whole and sum(info.file_size for info in files.values()) <= MOST_BYTES:
                own = (name for name in files if not name.startswith(".info/"))  # Flower's list of the rest
                return digest_of_sources({name: bundle.read(name) for name in own})
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError):
        pass  # no archive, a damaged or an encrypted one
    return hashlib.sha256(content).hexdigest()


def digest_of_sources(files: Mapping[str, bytes]) -> str:
    """Of names and contents, in the names' order.

    Every file counts but `pyproject.toml`, of which a checkout has its own and a wheel none.
    """
    whole = hashlib.sha256()
    for name in sorted(set(files) - {"pyproject.toml"}):
        whole.update(f"{name}\0{hashlib.sha256(files[name]).hexdigest()}\n".encode())
    return whole.hexdigest()
