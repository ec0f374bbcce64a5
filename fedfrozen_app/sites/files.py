"""Write the files of a kit atomically, with their mode from the first byte."""

import os
from pathlib import Path

SECRET, PUBLIC, SCRIPT = 0o600, 0o644, 0o755


def write(path: Path, content: bytes, mode: int) -> None:
    """A key is never readable by others, not even briefly, and no file is ever incomplete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    part.chmod(mode)
    part.replace(path)
