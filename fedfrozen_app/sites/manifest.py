"""The signed list of a kit's files, and whether the files still match it.

`files` are the federation's and must not change; `yours` (site.yaml, policy.yaml) are checked when the kit is
installed, and are then the party's own to change. Keys are in no list: they are never sent.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from fedfrozen_app.core.certificates import read_trusted, signed_by_one_of
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites.authority import Signer
from fedfrozen_app.sites.files import PUBLIC, write

LIST, SIGNATURE = "manifest.json", "manifest.sig"
YOURS = ("site.yaml", "policy.yaml")
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    name: str
    role: str
    files: dict[str, str]
    yours: dict[str, str]


def sign(folder: Path, names: list[str], signer: Signer, name: str, role: str) -> None:
    """Write the list of these files of the folder, and the authority's signature on it."""
    digests = {file: _digest(folder / file) for file in sorted(names)}
    content = {
        "format": FORMAT,
        "name": name,
        "role": role,
        "files": {file: digest for file, digest in digests.items() if file not in YOURS},
        "yours": {file: digest for file, digest in digests.items() if file in YOURS},
    }
    text = json.dumps(content, indent=1).encode()
    write(folder / LIST, text, PUBLIC)
    write(folder / SIGNATURE, signer.sign(text), PUBLIC)


def read(folder: Path, trust: Path) -> Manifest:
    """The list of a kit, signed by an authority of the `trust` file."""
    try:
        text, signature = (folder / LIST).read_bytes(), (folder / SIGNATURE).read_bytes()
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} has no {LIST}: it is of an older version. Renew it with `fedfrozen site renew`, which "
            "keeps its data, policy, budget and audit log."
        ) from error
    if not signed_by_one_of(text, signature, read_trusted(trust)):
        raise UserError(f"{folder / LIST} is not signed by the authority of {trust}: do not use this kit.")
    found = json.loads(text)  # signed by the authority, so its types are not checked
    if found.get("format") != FORMAT:
        raise UserError(f"{folder / LIST} is of another version of this package: install the same one.")
    return Manifest(found["name"], found["role"], found["files"], found["yours"])


def changed(folder: Path, files: dict[str, str]) -> list[str]:
    """Files that are missing or differ from what was signed."""
    return [name for name, digest in files.items() if _digest(folder / name) != digest]


def check(folder: Path) -> Manifest:
    """The list of an installed kit; `UserError` if a file differs from what the authority signed."""
    found = read(folder, folder / "ca.crt")
    if wrong := changed(folder, found.files):
        raise UserError(
            f"{folder / wrong[0]} is not as the authority signed it: bring it back, `fedfrozen site install`."
        )
    return found


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "missing"
