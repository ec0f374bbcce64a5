"""One digest for one source: a checkout, a wheel and whatever was installed from it, packed by anybody."""

import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from fedfrozen_app.core.app_folder import app_folder
from fedfrozen_app.core.bundles import SOURCES, bundle_digest, source_digest
from fedfrozen_app.sites.executor import bundle_of
from fedfrozen_app.sites.kit_writer import bundle_digest as provisioned

CHECKOUT = Path(__file__).resolve().parents[3]
PRINT = "import pathlib, sys; from fedfrozen_app.core.bundles import *; w = pathlib.Path(sys.argv[1])\n"
PRINT += "from fedfrozen_app.core.app_folder import app_folder\n"
PRINT += "from flwr.cli.build import build_fab_from_disk as b; f = app_folder(w)\n"
PRINT += "print(f); print(source_digest(f)); print(bundle_digest(b(f)))"


def by(place: Path, work: Path) -> tuple[Path, str, str]:
    """What a Python finds that has the package at this place: its app folder and both digests."""
    done = subprocess.run(
        [sys.executable, "-c", PRINT, str(work)],
        cwd=work.parent,
        env=os.environ | {"PYTHONPATH": str(place)},
        check=True,
        capture_output=True,
        text=True,
    )
    folder, *digests = done.stdout.split()
    return Path(folder), *digests


def test_a_bundle_s_digest_is_that_of_its_sources(tmp_path):
    digest = source_digest(app_folder(tmp_path))
    fab = build_fab_from_disk(CHECKOUT)
    assert bundle_digest(fab) == digest == provisioned(tmp_path)
    assert bundle_of(type("Fab", (), {"content": fab})()) == digest  # by which a site's policy goes
    # Packed in another order, with other times and another compression.
    source, packed = zipfile.ZipFile(io.BytesIO(fab)), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as other:
        for name in reversed(source.namelist()):
            other.writestr(zipfile.ZipInfo(name, (2001, 1, 1, 0, 0, 0)), source.read(name))
    assert packed.getvalue() != fab and bundle_digest(packed.getvalue()) == digest


def test_a_byte_a_name_or_a_file_more_is_another_digest(tmp_path):
    for folder in {pattern.partition("/")[0] for pattern in SOURCES}:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / folder, tmp_path / folder, ignore=ignore)
    digest, found = source_digest(tmp_path), set()
    assert digest == source_digest(CHECKOUT)
    policy = tmp_path / "fedfrozen_app" / "sites" / "policy.py"
    text = policy.read_bytes()
    policy.write_bytes(text + b"\n")
    found.add(source_digest(tmp_path))
    policy.rename(policy.with_name("policies.py"))
    found.add(source_digest(tmp_path))
    policy.with_name("policies.py").rename(policy)
    policy.write_bytes(text)
    (tmp_path / "clients" / "more.py").write_text("")
    found.add(source_digest(tmp_path))
    assert len(found | {digest}) == 4


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04" + b"\0" * 40])
def test_what_is_no_archive_has_a_digest_that_nobody_allows(content):
    assert len(bundle_digest(content)) == 64 and bundle_digest(content) != source_digest(CHECKOUT)


def test_a_name_twice_in_an_archive_is_no_bundle_of_ours():
    fab = io.BytesIO(build_fab_from_disk(CHECKOUT))
    with zipfile.ZipFile(fab, "a") as bundle, pytest.warns(UserWarning):
        bundle.writestr("clients/fedavg.py", (CHECKOUT / "clients" / "fedavg.py").read_text())
    assert bundle_digest(fab.getvalue()) != source_digest(CHECKOUT)


@pytest.mark.slow
def test_wheel_editable_install_and_image_have_one_digest(tmp_path):
    """An image's package is a wheel that pip installed, as another user and at another time."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=CHECKOUT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    for name in ("wheel", "image"):
        target = tmp_path / name / "site-packages"
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "-t", str(target)]
        subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    for path in (tmp_path / "image").rglob("*"):
        os.utime(path, (0, 0))
    found = {}
    for name, place in {
        "editable": CHECKOUT,
        "wheel": tmp_path / "wheel" / "site-packages",
        "image": tmp_path / "image" / "site-packages",
    }.items():
        (tmp_path / f"{name}-work").mkdir()
        folder, *found[name] = by(place, tmp_path / f"{name}-work")
        assert (folder == CHECKOUT) == (name == "editable")
    assert len({digest for digests in found.values() for digest in digests}) == 1, found
