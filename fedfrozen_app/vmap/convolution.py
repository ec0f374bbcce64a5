"""Convolutions for code that runs under `vmap` over their weights: matrix products in place of groups.

A convolution with per-client weights becomes one with as many groups as clients, and cuDNN runs some of those
group by group. Patches as rows, (batch, places, kernel · channels), make it a batched product.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fedfrozen_app.vmap.model_modes import with_forwards

LARGEST = 49  # places of an overlapping convolution kernel: each copies the image
TOGETHER = 8  # bf16 numbers that a GPU reads at once: channel counts that are multiples are fast


def as_products(
    model: nn.Module, trained: Collection[str], *, views: bool = False
) -> AbstractContextManager[None]:
    """Within it trained convolutions are computed in `product_ways`."""
    return with_forwards(product_ways(model, trained, views=views))


def product_ways(
    model: nn.Module, trained: Collection[str], *, views: bool = False
) -> dict[nn.Module, Callable[..., Any]]:
    """Forward functions of trained convolutions as products; shared ones remain convolutions.

    `views`: their patches are views of the picture, which is faster on a GPU without a compiler.
    """
    product = partial(_product, views=views)
    ways: dict[nn.Module, Callable[..., Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            trains = f"{name}.weight" in trained
            way: Callable[[Any, Tensor], Tensor] = product if trains and _can(module) else _as_it_is
            ways[module] = partial(way, module)
    return ways


def _can(module: nn.Module) -> bool:
    if type(module) is not nn.Conv2d or module.groups != 1 or module.padding_mode != "zeros":
        return False
    small = module.kernel_size == module.stride or module.weight[0, 0].numel() <= LARGEST
    return small and module.dilation == (1, 1) and not isinstance(module.padding, str)


def _as_it_is(conv: nn.Conv1d | nn.Conv2d, pictures: Tensor) -> Tensor:
    """The module's own convolution. Autocast does not apply within `vmap`, so inputs are cast explicitly for
    rounded weights."""
    return conv._conv_forward(pictures.to(conv.weight.dtype), conv.weight, conv.bias)


def _product(conv: nn.Conv2d, pictures: Tensor, *, views: bool) -> Tensor:
    """(batch, channels, height, width) -> (batch, out, rows, columns), as the module's own forward."""
    seen = patches(conv, pictures, views=views)
    kernel = conv.weight.permute(2, 3, 1, 0).flatten(0, 2)  # (tall · wide · channels, out)
    result = seen.flatten(3).flatten(1, 2) @ kernel  # (batch, rows · columns, out)
    if conv.bias is not None:
        result = result + conv.bias
    return result.transpose(1, 2).unflatten(2, seen.shape[1:3])


def patches(conv: nn.Conv2d, pictures: Tensor, *, views: bool) -> Tensor:
    """The input patch of each place of a convolution: (batch, rows, columns, tall, wide, channels)."""
    (tall, wide), (down, right) = conv.kernel_size, conv.stride
    above, left = (int(side) for side in conv.padding)  # not a string: see _can
    pictures = pad(pictures, (left, left, above, above)) if above or left else pictures
    rows, columns = (pictures.shape[2] - tall) // down + 1, (pictures.shape[3] - wide) // right + 1
    if conv.kernel_size == conv.stride:  # patches that do not overlap are a permutation of the image
        cut = pictures[:, :, : rows * tall, : columns * wide]
        return cut.unflatten(3, (columns, wide)).unflatten(2, (rows, tall)).permute(0, 2, 4, 3, 5, 1)
    if views:  # one GPU kernel for the rows and two for their gradient; shifts take three each
        return pictures.unfold(2, tall, down).unfold(3, wide, right).permute(0, 2, 3, 4, 5, 1)
    return _shifted(pictures, conv, rows, columns)


def _shifted(pictures: Tensor, conv: nn.Conv2d, rows: int, columns: int) -> Tensor:
    """The patches as shifted pictures, one for each place of the kernel: a compiler fuses them into one loop,
    and on a CPU they are faster than the gradient of a view."""
    (tall, wide), (down, right) = conv.kernel_size, conv.stride
    last = pictures.movedim(1, -1)
    places = [
        last[:, y : y + down * (rows - 1) + 1 : down, x : x + right * (columns - 1) + 1 : right]
        for y in range(tall)
        for x in range(wide)
    ]
    return torch.stack(places, dim=3).unflatten(3, (tall, wide))
