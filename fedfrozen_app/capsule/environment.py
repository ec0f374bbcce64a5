"""The environment of a capsule: bundle hash, wheel, exact package versions, machine."""

import base64
import hashlib
import os
import platform
import zipfile
from importlib.metadata import PackageNotFoundError, distribution, distributions, version
from pathlib import Path
from typing import Any

import torch

import fedfrozen_app
from fedfrozen_app.core.app_folder import app_folder
from fedfrozen_app.core.bundles import digest_of_sources, source_digest
from fedfrozen_app.core.errors import UserError

PACKAGES = ("fedfrozen_app/", "strategies/", "clients/")
BUILD = "  # built as "  # in a lock, before the exact build of a version
CONF = "fedfrozen_app/conf/"  # where a wheel has it; a bundle has conf/


def lock() -> list[str]:
    """NAME==VERSION of every installed package, as pip reads it; except fedfrozen, which is a wheel."""
    found = {
        one.metadata["Name"].lower().replace("_", "-"): one.version
        for one in distributions()
        if one.metadata["Name"]
    }
    return [f"{name}=={number}" for name, number in sorted(found.items()) if name != "fedfrozen"]


def lock_text() -> str:
    """The lock as a file for pip. A build such as 2.13.0+cpu is available from one index only: the lock names
    its version, and a comment records the build."""
    lines = []
    for word in lock():
        version_here, plus, build = word.partition("+")
        lines.append(f"{version_here}{BUILD}{word.partition('==')[2]}\n" if plus and build else f"{word}\n")
    return "".join(lines)


def lock_differences(text: str) -> list[str]:
    """Packages in this lock that are installed here in another version or build, or not at all."""
    here = dict(word.partition("==")[::2] for word in lock())
    found = []
    for line in text.splitlines():
        word, _, build = line.partition(BUILD)
        name, _, number = word.partition("==")
        if here.get(name) != (build or number):
            found.append(f"{name} {build or number} (here {here.get(name, 'not installed')})")
    return found


def machine() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": platform.processor() or "unknown",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "python": platform.python_version(),
    }


def sources(work: Path) -> str:
    """The bundle hash of the running code."""
    return source_digest(app_folder(work))


def build_wheel(work: Path) -> Path:
    """A wheel of the running code: built from the checkout, or repacked from the installed files."""
    root = Path(fedfrozen_app.__file__).parents[1]
    if not (root / "pyproject.toml").is_file():
        return _repacked(work)
    try:
        from hatchling.builders.wheel import WheelBuilder
    except ImportError as error:
        raise UserError("A capsule holds a wheel of this checkout: pip install hatchling.") from error
    return Path(next(WheelBuilder(str(root)).build(directory=str(work), versions=["standard"])))


def _repacked(work: Path) -> Path:
    try:
        ours = distribution("fedfrozen")
    except PackageNotFoundError as error:
        raise UserError(
            "fedfrozen is not installed here: pip install it, so that it can be packed."
        ) from error
    path = work / f"fedfrozen-{version('fedfrozen')}-py3-none-any.whl"
    record = f"fedfrozen-{version('fedfrozen')}.dist-info/RECORD"
    lines = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(ours.files or (), key=str):
            name, place = str(file), Path(str(file.locate()))
            own = name.startswith((*PACKAGES, "fedfrozen-")) or name == "fedfrozen.py"
            if not own or name.endswith((".pyc", "RECORD", "INSTALLER", "REQUESTED", "direct_url.json")):
                continue
            content = place.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(content)}")
            packed.writestr(name, content)
        packed.writestr(record, "\n".join([*lines, f"{record},,", ""]))
    return path


def sources_of_wheel(path: Path) -> str:
    """The bundle hash of the code in a wheel."""
    with zipfile.ZipFile(path) as wheel:
        return digest_of_sources(
            {
                name.removeprefix("fedfrozen_app/") if name.startswith(CONF) else name: wheel.read(name)
                for name in wheel.namelist()
                if name.startswith(PACKAGES) and _is_source(name)
            }
        )


def _is_source(name: str) -> bool:
    if name.startswith(CONF):
        return name.endswith(".yaml")
    return name.endswith(".py") or name == "fedfrozen_app/report/page_assets.json"
