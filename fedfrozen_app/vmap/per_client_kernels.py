"""Layer norms, biases and convolutions for code that runs under `vmap` over their weights: one GPU kernel
each.

With per-client weights torch launches several kernels, and each reads and writes the layer's whole output: in
a captured Transformer step that takes longer than the matrix products.
"""

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedfrozen_app.core.formatting import format_error
from fedfrozen_app.vmap.convolution import LARGEST, TOGETHER, patches
from fedfrozen_app.vmap.devices import has_gpu_kernels
from fedfrozen_app.vmap.model_modes import with_forwards
from fedfrozen_app.vmap.per_client_products import product_per_client
from fedfrozen_app.vmap.vmap_escape import stacked

log = logging.getLogger(__name__)
NARROW = 64  # a layer with fewer outputs is not worth it
Kind = tuple[type[nn.Module], tuple[int, ...]]


class PerClientKernels:
    """The GPU kernels for one model. `products`: the type in which its products are computed."""

    def __init__(self, model: nn.Module, device: torch.device, products: torch.dtype) -> None:
        self._model, self._device, self._products = model, device, products
        self._ours = [module for module in model.modules() if type(module) in WAYS and _fits(module)]

    def begin(self, *, traced: bool = False) -> "Future[None] | None":
        """Compile the kernels in the background, which takes seconds without a cache; None if there are
        none."""
        kinds = frozenset(_kind(module) for module in self._ours if type(module) in _ways(traced))
        return (
            _compiling(self._device, kinds, self._products)
            if kinds and has_gpu_kernels(self._device)
            else None
        )

    def used(self, trained: Collection[str], *, traced: bool = False) -> AbstractContextManager[None]:
        """Within the block trained layer norms, biases and convolutions are one GPU kernel each, if there is
        a GPU. `traced`: only convolutions, for a compiler that fuses the others itself."""
        if (job := self.begin(traced=traced)) is None or not _is_compiled(job):
            return nullcontext()
        ways = _ways(traced)
        own = {
            module: partial(ways[type(module)], module)
            for name, module in self._model.named_modules()
            if module in self._ours and type(module) in ways and f"{name}.{LEADS[type(module)]}" in trained
        }
        return with_forwards(own)

    def shared_norms(self, parts: Collection[nn.Module]) -> AbstractContextManager[None]:
        """Within the block the frozen layer norms of these modules use such GPU kernels, too: on many rows
        torch's own takes twice as long."""
        norms = [module for module in self._ours if type(module) is nn.LayerNorm]
        if not norms or (job := self.begin()) is None or not _is_compiled(job):
            return nullcontext()
        inside = {module for part in parts for module in part.modules()}
        return with_forwards({module: partial(_norm, module) for module in norms if module in inside})


def _fits(module: Any) -> bool:
    if module.weight is None or module.weight.dtype != torch.float32:
        return False
    if isinstance(module, nn.Conv2d):
        usual = (module.groups, module.stride, module.dilation) == (1, (1, 1), (1, 1))
        zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return usual and zeros and module.kernel_size != (1, 1)
    return module.bias is not None and module.bias.dim() == 1 and len(module.bias) >= NARROW


def _kind(module: Any) -> Kind:
    """A key that is equal for modules that need the same GPU kernels."""
    if isinstance(module, nn.Conv2d):
        if _is_narrow(module):
            return nn.Conv2d, (1, 1, module.weight[0].numel(), module.out_channels, 0, 0)
        return nn.Conv2d, (*module.kernel_size, module.in_channels, module.out_channels, *module.padding)
    return type(module), (len(module.bias),)


def _is_narrow(module: nn.Conv2d) -> bool:
    """Whether it has too few channels per place for vectorised GPU reads, and small patches."""
    return module.in_channels < TOGETHER and module.weight[0, 0].numel() <= LARGEST


@cache  # for all models of a process: while one captures its steps, no other may launch anything
def _compiling(device: torch.device, kinds: frozenset[Kind], products: torch.dtype) -> Future[None]:
    def make() -> None:
        from fedfrozen_app.vmap import conv_kernels, row_kernels

        sizes = {of: [size for kind, size in kinds if kind is of] for of in WAYS}
        norms, others = ([width for (width,) in sizes[of]] for of in (nn.LayerNorm, nn.Linear))
        works = row_kernels.trials(device, norms, others, products)
        works += conv_kernels.trials(device, sizes[nn.Conv2d], products)
        with ThreadPoolExecutor(len(works)) as pool:
            for made in [pool.submit(there, work) for work in works]:
                made.result()

    def there(work: Callable[[], Any]) -> None:
        with torch.cuda.device(device):  # Triton uses the thread's current device
            work()

    pool = ThreadPoolExecutor(1, thread_name_prefix="gpu-kernels")
    job = pool.submit(make)
    pool.shutdown(wait=False)
    return job


@cache
def _is_compiled(job: Future[None]) -> bool:
    """Whether the kernels can be used. A compiler can fail in any way, and training works without them."""
    try:
        job.result()
    except Exception as error:  # noqa: BLE001  (see above)
        log.warning(
            "GPU kernels for per-client layers could not be compiled, and steps are slower without: %s",
            format_error(error),
        )
        return False
    return True


def _norm(module: nn.LayerNorm, rows: Tensor) -> Tensor:
    from fedfrozen_app.vmap.row_kernels import Normalised

    # As under autocast: a norm is computed in float32 and stays float32.
    dtype = torch.float32 if torch.is_autocast_enabled(rows.device.type) else rows.dtype

    def kernel(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        found: Tensor = Normalised.apply(rows, weight, bias, module.eps, dtype)
        return found

    return _stacked(kernel, rows, module.weight, module.bias)


def _product(module: nn.Linear, rows: Tensor) -> Tensor:
    from fedfrozen_app.vmap.row_kernels import Shifted

    return _stacked(Shifted.apply, product_per_client(rows, module.weight), module.bias)


def _convolution(module: nn.Conv2d, pictures: Tensor, *, traced: bool = False) -> Tensor:
    """(batch, channels, rows, columns) -> (batch, out, …), with channels last in memory."""
    from fedfrozen_app.vmap.conv_kernels import Convolved
    from fedfrozen_app.vmap.row_kernels import Shifted

    padding: Any = module.padding
    pictures, kernels = pictures.to(module.weight.dtype), module.weight.permute(0, 2, 3, 1)
    if _is_narrow(module):  # small patches: compute their product
        last, padding = patches(module, pictures, views=not traced).flatten(3), (0, 0)
        kernels = kernels.flatten(1)[:, None, None]
    else:
        last = pictures.movedim(1, -1)

    def kernel(pictures: Tensor, kernels: Tensor) -> Tensor:
        found: Tensor = Convolved.apply(pictures, kernels, padding, traced)
        return found

    found = _stacked(kernel, last, kernels)
    if module.bias is not None:
        found = found + module.bias if traced else _stacked(Shifted.apply, found, module.bias)
    return found.movedim(-1, 1)


WAYS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.LayerNorm: _norm,
    nn.Linear: _product,
    nn.Conv2d: _convolution,
}
# The parameter whose training makes a module differ between clients.
LEADS: dict[type[nn.Module], str] = {nn.LayerNorm: "bias", nn.Linear: "bias", nn.Conv2d: "weight"}


def _ways(traced: bool) -> dict[type[nn.Module], Callable[..., Tensor]]:
    return {nn.Conv2d: partial(_convolution, traced=True)} if traced else WAYS


def _stacked(kernel: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Run a GPU kernel for (clients, …): further axes of runs or examples count as further clients."""

    def flat(lead: int, *whole: Tensor) -> Tensor:
        found = kernel(*(each.flatten(0, lead - 1) for each in whole))
        return found.unflatten(0, whole[0].shape[:lead])

    return stacked(flat, *tensors)
