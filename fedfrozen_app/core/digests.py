"""The digest that identifies an array on both sides: SHA-256 of its dtype, shape and bytes."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain, islice

import torch
from torch import Tensor

PIECE = 2**18  # bytes that are hashed at a time; part of the digest's definition
THREADS = min(16, os.cpu_count() or 1)


def raw_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def digest(tensor: Tensor) -> str:
    """SHA-256 of an array's dtype, shape and the digests of its bytes, piece by piece."""
    (found,) = digests({"": tensor}).values()
    return found


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digests of tensors, by name."""
    return start_digests(tensors)()


def start_digests(
    tensors: Mapping[str, Tensor], coming: Callable[[], dict[str, Tensor]] | None = None
) -> Callable[[], dict[str, str]]:
    """Start computing digests; returns a function that waits for them. Do not change the arrays before it
    returns. `coming`: their bytes, if `bytes_on_their_way` was called before.

    Large arrays are hashed on threads: hashing is most of the server's work for a large model.
    """
    pieces = {name: _pieces(data) for name, data in (coming or bytes_on_their_way(tensors))().items()}
    queue = [piece for parts in pieces.values() if len(parts) > 1 for piece in parts]
    # One share per thread: submitting single pieces takes as long as hashing them.
    share = -(-len(queue) // THREADS) or 1
    jobs = [_pool().submit(_hash_all, queue[i : i + share]) for i in range(0, len(queue), share)]
    # Small arrays are hashed on this thread while the others run.
    small = {name: _hash_all(parts) for name, parts in pieces.items() if len(parts) <= 1}

    def wait() -> dict[str, str]:
        found = chain.from_iterable(job.result() for job in jobs)
        large = {name: list(islice(found, len(parts))) for name, parts in pieces.items() if len(parts) > 1}
        hashes = small | large
        return {name: _digest_of(tensor, hashes[name]) for name, tensor in tensors.items()}

    return wait


def bytes_on_their_way(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Start copying bytes to the host; returns a function that waits for them: views of arrays on the CPU;
    from a GPU in one asynchronous copy."""
    flat = {name: t.detach().contiguous().reshape(-1).view(torch.uint8) for name, t in tensors.items()}
    if not any(data.is_cuda for data in flat.values()):
        return lambda: flat
    together = torch.cat(list(flat.values()))
    here = torch.empty(together.shape, dtype=torch.uint8, pin_memory=True)
    here.copy_(together, non_blocking=True)
    arrived = torch.cuda.current_stream(together.device).record_event()
    lengths = [len(data) for data in flat.values()]

    def wait() -> dict[str, Tensor]:
        arrived.synchronize()
        return dict(zip(flat, here.split(lengths), strict=True))

    return wait


def _digest_of(tensor: Tensor, hashes: Iterable[bytes]) -> str:
    found = hashlib.sha256(f"{tensor.dtype}:{tuple(tensor.shape)}:".encode())
    for each in hashes:
        found.update(each)
    return found.hexdigest()


def _pieces(data: Tensor) -> list[memoryview]:
    view = data.numpy().data
    return [view[start : start + PIECE] for start in range(0, len(view), PIECE)]


def _hash_all(pieces: Iterable[memoryview]) -> list[bytes]:
    return [hashlib.sha256(piece).digest() for piece in pieces]


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="digest")
