"""The folder that Flower bundles for its nodes: the checkout, or one assembled from an installed wheel."""

import shutil
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import fedfrozen_app
from fedfrozen_app.core.errors import UserError

# The [tool.flwr.app] tables of the checkout's pyproject.toml, which a wheel does not contain.
APP_TABLES = """\
[tool.flwr.app]
publisher = "fedfrozen"
fab-include = [
    "fedfrozen_app/**/*.py",
    "fedfrozen_app/report/page_assets.json",
    "strategies/**/*.py",
    "clients/**/*.py",
    "conf/**/*.yaml",
]

[tool.flwr.app.components]
serverapp = "fedfrozen_app.server_app:app"
clientapp = "fedfrozen_app.client_app:app"

[tool.flwr.app.config]
overrides = ""
server-overrides = ""
output-dir = ""
census = ""
survival = ""
"""


def app_folder(work_dir: Path) -> Path:
    """The folder that Flower can bundle: the checkout, or one made from the installed wheel."""
    package = Path(fedfrozen_app.__file__).parent
    project = package.parent / "pyproject.toml"
    if project.exists():
        tool = tomllib.loads(project.read_text("utf-8")).get("tool", {})
        if "app" in tool.get("flwr", {}):
            return package.parent
    return assemble_app_folder(package, work_dir / "app")


def assemble_app_folder(package: Path, folder: Path) -> Path:
    """Lay the installed packages and their `conf` out as in a checkout, below a pyproject.toml."""
    sources = {"fedfrozen_app": package, "conf": package / "conf"}
    for name in ("strategies", "clients"):
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"The package '{name}' is missing: install fedfrozen again.")
        sources[name] = Path(next(iter(spec.submodule_search_locations)))
    shutil.rmtree(folder, ignore_errors=True)
    for name, source in sources.items():
        # `conf` lies inside the package in a wheel and beside it in a bundle.
        ignore = shutil.ignore_patterns("__pycache__", "conf")
        shutil.copytree(source, folder / name, ignore=ignore)
    head = f'[project]\nname = "fedfrozen"\nversion = "{version("fedfrozen")}"\ndependencies = []\n'
    (folder / "pyproject.toml").write_text(f"{head}\n{APP_TABLES}", encoding="utf-8")
    return folder
