"""The private state of very many clients on disk: `client_states/N.safetensors` of a run's folder.

A segment holds the arrays of the clients that changed since the previous segment, stacked: clients with equal
names and shapes form a group, with one tensor per name. A segment is never changed. A checkpoint names the
segments that it needs with their digests, so its size depends on the clients of its last rounds, not on how
many have taken part.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.files.disk import replace_tensors, whole_file

if TYPE_CHECKING:  # torch takes seconds to import
    from torch import Tensor

FOLDER = "client_states"
GROUPS, CLIENTS = "groups", "clients"
MOST_OPEN = 64  # files
Arrays = dict[str, "Tensor"]


class ClientSegments:
    """The newest arrays of each client that has any."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        self._places: dict[int, tuple[int, int, int]] = {}  # client: segment, group, row
        self._digests: dict[int, str] = {}  # of the segments that are needed
        self._open: dict[int, tuple[Any, list[list[str]]]] = {}  # files, and the names of their groups
        self._named: dict[int, Mapping[str, str]] = {}  # by checkpoint, what it needs

    def __contains__(self, client: int) -> bool:
        return client in self._places

    def __len__(self) -> int:
        return len(self._places)

    def read(self, client: int) -> Arrays:
        number, group, row = self._places[client]
        file, groups = self._opened(number)
        slices = ((name, file.get_slice(f"{group}/{name}")) for name in groups[group])
        return {name: rows[row : row + 1][0].clone() for name, rows in slices}

    def write(self, arrays: Mapping[int, Mapping[str, "Tensor"]]) -> None:
        """Write a segment with these clients, which replaces their earlier arrays."""
        if not arrays:
            return
        number = 1 + max((int(path.stem) for path in self._files()), default=0)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(number)
        replace_tensors(*_stacked(arrays, path))
        self._digests[number] = _digest(path)
        self._enter(number)
        self._drop_unused()

    def named(self) -> dict[str, str]:
        """The digest of each segment that is needed now, for a checkpoint."""
        return {str(number): digest for number, digest in sorted(self._digests.items())}

    def keep_for(self, rounds: Iterable[int], named_by: Callable[[int], Mapping[str, str]]) -> None:
        """Delete segments that the checkpoints of these rounds do not need; `named_by` reads a checkpoint's
        list."""
        known = self._named
        self._named = {number: known[number] if number in known else named_by(number) for number in rounds}
        self.keep_only(self._named.values())

    def keep_only(self, named: Iterable[Mapping[str, str]]) -> None:
        """Delete files that neither the run nor the remaining checkpoints need; `named`: their lists."""
        kept = {int(number) for one in named for number in one} | set(self._digests)
        for path in self._files():
            if int(path.stem) not in kept:
                path.unlink(missing_ok=True)

    def restore(self, named: Mapping[str, str], source: Path) -> None:
        """Restore the segments that a checkpoint of the run in `source` names; deletes files of later rounds
        here."""
        for number, digest in sorted((int(number), digest) for number, digest in named.items()):
            origin, path = source / FOLDER / f"{number}.safetensors", self._path(number)
            try:
                if _digest(origin) != digest:
                    raise ValueError(f"{origin.name} is not as it was written")
                if origin.resolve() != path.resolve():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with whole_file(path) as part:
                        shutil.copyfile(origin, part)
                self._digests[number] = digest
                self._enter(number)
            except (SafetensorError, *DAMAGED) as error:
                raise UserError(
                    f"{origin}, which the checkpoint needs, cannot be read ({error}): bring it back from a "
                    "copy, or start again."
                ) from error
        self.keep_only(())

    def clear(self) -> None:
        """Delete segments that an earlier run left in the folder of a new run."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _enter(self, number: int) -> None:
        file, groups = self._opened(number)
        for group in range(len(groups)):
            clients = file.get_tensor(f"{group}:{CLIENTS}").tolist()
            self._places.update((client, (number, group, row)) for row, client in enumerate(clients))

    def _drop_unused(self) -> None:
        used = {number for number, _, _ in self._places.values()}
        for number in set(self._digests) - used:
            del self._digests[number]
            self._open.pop(number, None)

    def _opened(self, number: int) -> tuple[Any, list[list[str]]]:
        if number not in self._open:
            if len(self._open) >= MOST_OPEN:
                del self._open[next(iter(self._open))]
            file = safe_open(self._path(number), "pt")
            self._open[number] = file, json.loads(file.metadata()[GROUPS])
        return self._open[number]

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.safetensors"

    def _files(self) -> list[Path]:
        return [path for path in self.folder.glob("*.safetensors") if path.stem.isdigit()]


def _stacked(arrays: Mapping[int, Mapping[str, "Tensor"]], path: Path) -> tuple[Arrays, Path, dict[str, str]]:
    """The arguments of `replace_tensors`."""
    import torch

    alike: dict[Any, list[int]] = {}
    for client, own in arrays.items():
        kind = tuple((name, value.dtype, value.shape) for name, value in sorted(own.items()))
        alike.setdefault(kind, []).append(client)
    tensors: Arrays = {}
    for group, (kind, clients) in enumerate(alike.items()):
        tensors[f"{group}:{CLIENTS}"] = torch.tensor(clients)
        for name, _, _ in kind:
            tensors[f"{group}/{name}"] = torch.stack(
                [arrays[client][name].detach().cpu() for client in clients]
            )
    names = [[name for name, _, _ in kind] for kind in alike]
    return tensors, path, {GROUPS: json.dumps(names)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
