"""Read runs from folders and group them."""

from pathlib import Path

from fedfrozen_app.compare.model import Comparison


def collect(folders: list[Path], **options: object) -> Comparison:
    raise NotImplementedError
