"""`ro-crate-metadata.json`: the capsule as an RO-Crate 1.1, for archives and people without fedfrozen."""

import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAME = "ro-crate-metadata.json"
VERSION = "1.1"
CONTEXT = f"https://w3id.org/ro/crate/{VERSION}/context"
LICENCES = "https://spdx.org/licenses/"
ABOUT = {
    "capsule.json": "Digests of every file, the data by digest, the environment, and the claims",
    "requirements.txt": "The exact versions of all installed packages",
    "comparison.csv": "The comparison table with 95 % intervals",
    "comparison.md": "The same as Markdown",
    "CITATION.cff": "How to cite this",
    "LICENSE": "The licence of the code",
    "metrics.jsonl": "One row per round",
    "summary.json": "The results of a run, with its resolved configuration",
    "data.json": "The rows that a run read, by split, client and class",
}


@dataclass(frozen=True)
class About:
    """Publication metadata of a capsule, given by its authors."""

    title: str
    author: str
    licence: str  # an SPDX identifier
    published: str  # a date with time
    url: str = ""  # of the publisher


def metadata(
    about: About, sizes: Mapping[str, int], wheel: str, commands: Mapping[str, str]
) -> dict[str, Any]:
    """The RO-Crate's content. `sizes`: of each other file, by its name; `commands`: the command of each
    run."""
    files = [_file(name, size) for name, size in sorted(sizes.items())]
    name = about.url or "#author"
    author = {"@id": name, "@type": "Organization", "name": about.author}
    if about.url:
        author["url"] = about.url
    licence = {
        "@id": f"{LICENCES}{about.licence}",
        "@type": "CreativeWork",
        "name": about.licence,
        "description": f"SPDX licence {about.licence}",
    }
    runs = [
        {
            "@id": f"#run-{name}",
            "@type": "CreateAction",
            "name": f"Run {name}",
            "description": command,
            "instrument": {"@id": wheel},
            "result": [{"@id": one} for one in sorted(sizes) if one.startswith(f"runs/{name}/")],
        }
        for name, command in commands.items()
    ]
    root = {
        "@id": "./",
        "@type": "Dataset",
        "name": about.title,
        "description": (
            f"{about.title}: {len(commands)} federated training runs with raw rows, configurations, digests "
            "of their data, the code and its environment. `fedfrozen reproduce` runs them again."
        ),
        "datePublished": about.published,
        "license": {"@id": licence["@id"]},
        "author": {"@id": author["@id"]},
        "publisher": {"@id": author["@id"]},
        "hasPart": [{"@id": one["@id"]} for one in files],
        "mentions": [{"@id": one["@id"]} for one in runs],
    }
    descriptor = {
        "@id": NAME,
        "@type": "CreativeWork",
        "conformsTo": {"@id": f"https://w3id.org/ro/crate/{VERSION}"},
        "about": {"@id": "./"},
    }
    return {"@context": CONTEXT, "@graph": [descriptor, root, author, licence, *files, *runs]}


def _file(name: str, size: int) -> dict[str, Any]:
    last = name.rpartition("/")[2]
    kind = {"jsonl": "application/jsonl", "whl": "application/zip", "cff": "text/yaml", "md": "text/markdown"}
    encoding = kind.get(last.rpartition(".")[2]) or mimetypes.guess_type(last)[0] or "text/plain"
    found = {
        "@id": name,
        "@type": ["File", "SoftwareSourceCode"] if last.endswith(".whl") else "File",
        "name": last,
        "encodingFormat": encoding,
        "contentSize": str(size),
    }
    if last.endswith(".whl"):
        return found | {
            "description": "The code of these runs as a wheel",
            "programmingLanguage": {"@id": "https://www.python.org"},
        }
    return found | ({"description": ABOUT[last]} if last in ABOUT else {})
