"""The package that docs/adding-a-strategy.md and docs/client-steps.md write, installed."""

import re
import tomllib
from pathlib import Path

from tests.foreign_packages import install, make_wheel

NAMES = ("adding-a-strategy.md", "client-steps.md")
PAGE = "\n".join((Path(__file__).parents[2] / "docs" / name).read_text() for name in NAMES)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FILES = {
    text.splitlines()[0].removeprefix("# "): text
    for language, text in BLOCKS
    if language in ("python", "yaml", "toml")
}
SGD = ["client=sgd", "client.momentum=0", "client.lr=0.05", "client.lr_schedule=constant"]
VARIATES = ["strategy=variates", *SGD, "model.dtype=float64"]


def install_page_package(folder: Path) -> Path:
    """The folder into which pip has installed the page's package."""
    files = {name: text for name, text in FILES.items() if name.startswith("mymethods/")}
    points = tomllib.loads(FILES["pyproject.toml"])["project"]["entry-points"]
    wheel = make_wheel(folder, "mymethods", files, points)
    return install(wheel, folder / "site")
