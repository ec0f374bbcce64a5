"""A cache of the arrays that a machine's clients hold, by digest of their content.

Within one process they are plain tensors in memory. Between processes they are also files, one safetensors
file per array, shared by all clients of the machine, bounded in size, and verified at every read.
"""

import logging
import os
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedfrozen_app.core.digests import digest as digest_of
from fedfrozen_app.files.disk import patient

log = logging.getLogger(__name__)
DIGEST = re.compile(r"[0-9a-f]{64}")
SHARE = 16  # processes that may fill the free space concurrently


class Cache:
    def __init__(self, folder: Path | None = None, limit_bytes: int = 0) -> None:
        self._memory: dict[str, Tensor] = {}
        self._folder = folder
        self._limit = limit_bytes
        self._room = 0  # bytes that may be written before the folder is checked again
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def on_disk(self) -> bool:
        return self._folder is not None

    def complete(
        self, base: Mapping[str, str], sent: Mapping[str, Tensor], *, verify: bool
    ) -> tuple[dict[str, Tensor], list[str]]:
        """The arrays of `base` from the sent and the held ones, and the names that are missing.

        `verify`: check the digests of sent arrays; within one process the sender is trusted.
        """
        found: dict[str, Tensor] = {}
        for name, digest in base.items():
            tensor = sent.get(name)
            if tensor is not None and (not verify or digest_of(tensor) == digest):
                self.put(digest, tensor)
                found[name] = tensor
            elif (held := self.get(digest)) is not None:
                found[name] = held
        # Memory holds one base: no request will name older values again.
        current = set(base.values())
        self._memory = {key: value for key, value in self._memory.items() if key in current}
        return found, [name for name in base if name not in found]

    @patient
    def put(self, digest: str, tensor: Tensor) -> None:
        self._memory[digest] = tensor
        if self._folder is None or (path := self._path(digest)).exists():
            return
        size = tensor.numel() * tensor.element_size()
        if size > self._room:
            self._room = size + self._make_room(size) // SHARE
        self._room -= size
        # Other processes read this folder too: files are written atomically.
        handle, temporary = tempfile.mkstemp(dir=self._folder, suffix=".part")
        os.close(handle)
        try:
            save_file({"array": tensor.detach().cpu().contiguous()}, temporary)
        except (OSError, SafetensorError):
            Path(temporary).unlink()
            raise
        Path(temporary).replace(path)

    def get(self, digest: str) -> Tensor | None:
        if digest in self._memory:
            return self._memory[digest]
        if self._folder is None or not (path := self._path(digest)).exists():
            return None
        try:
            tensor = load_file(path)["array"]
        except (SafetensorError, KeyError, OSError, ValueError) as error:
            log.warning("The cached array %s cannot be read (%s): asking for it again.", path, error)
            path.unlink(missing_ok=True)
            return None
        if digest_of(tensor) != digest:
            log.warning("The cached array %s is damaged: asking for it again.", path)
            path.unlink(missing_ok=True)
            return None
        os.utime(path)  # mark as recently used: evicted last
        self._memory[digest] = tensor
        return tensor

    def held(self) -> Collection[str]:
        """Digests on disk, which a site lists in its hello."""
        if self._folder is None:
            return list(self._memory)
        found = (path.stem for path in self._folder.glob("*.safetensors"))
        return sorted(stem for stem in found if DIGEST.fullmatch(stem))

    def _path(self, digest: str) -> Path:
        assert self._folder is not None
        if not DIGEST.fullmatch(digest):  # from the server: it must not be a path out of this folder
            raise ValueError("an array is asked for by something that is no digest")
        return self._folder / f"{digest}.safetensors"

    def _make_room(self, size: int) -> int:
        """Make room for `size` bytes by evicting the least recently used files; returns the free bytes.

        Frees a tenth at once: the folder may have very many files, and listing them takes time.
        """
        assert self._folder is not None
        files = []
        for entry in os.scandir(self._folder):
            if not DIGEST.fullmatch(entry.name.removesuffix(".safetensors")):
                continue  # not a cache file, or not complete yet
            try:
                files.append((entry.stat(), entry.path))
            except FileNotFoundError:  # another process removed it concurrently
                continue
        total = sum(stat.st_size for stat, _ in files) + size
        if total > self._limit:
            for stat, path in sorted(files, key=lambda item: item[0].st_mtime_ns):
                Path(path).unlink(missing_ok=True)
                total -= stat.st_size
                if total <= 0.9 * self._limit:
                    break
        return max(self._limit - total, 0)
