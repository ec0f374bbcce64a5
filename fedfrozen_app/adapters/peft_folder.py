"""Adapters in peft's folder format: written for `PeftModel.from_pretrained`, and read as the start of a run.

Heads are peft's `modules_to_save`. Query, key and value of a fused projection are one adapter there: their
A's are stacked, and each B is in the rows of its own part. Merged deltas are also part of the adapter, which
then has a larger rank. `fedfrozen.json` keeps the digest of the base.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedfrozen_app.adapters import lora
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.models.split import PARTS, fused_part

WEIGHTS, NOTE, PREFIX = "adapter_model.safetensors", "fedfrozen.json", "base_model.model."
BASE = "base"  # subfolder for a base built from scratch
Factors = tuple[Tensor, Tensor]  # outer (out, rank) and inner (rank, in): their product is the change


def write(
    model: nn.Module,
    folder: Path,
    *,
    rank: int,
    alpha: float,
    merged_deltas: Mapping[str, Tensor],
    base: str,
    base_path: str | None,
    classes: Sequence[str],
) -> None:
    """The adapters and heads of `model`, with `merged_deltas` added; `base` is the digest of its frozen
    weights, and `base_path` their location; None: in the subfolder `BASE`."""
    import peft  # lazy: takes seconds, and training does not need it

    added = lora.merged_deltas_by_path(merged_deltas)
    scale, found = alpha / rank, {}
    for path in lora.adapted(dict(model.named_parameters())):
        module: Any = model.get_submodule(path)
        own = module.lora_B.weight.detach().cpu(), module.lora_A.weight.detach().cpu()
        found[path] = with_merged_deltas(own, added[path], scale) if path in added else own
    joined = _joined(model, found)
    arrays: dict[str, Tensor] = {}
    for path, (outer, inner) in joined.items():
        arrays |= {f"{PREFIX}{path}.{lora.A}": inner, f"{PREFIX}{path}.{lora.B}": outer}
    heads = [name for name, role in roles_of(model).items() if role.kind == "head"]
    values = dict(model.named_parameters())
    arrays |= {f"{PREFIX}{name}": values[name].detach().cpu() for name in heads}
    ranks = {path: inner.shape[0] for path, (_, inner) in joined.items() if inner.shape[0] != rank}
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=sorted(joined),
        modules_to_save=sorted({name.rpartition(".")[0] for name in heads}) or None,
        # s is the same for all, and so is peft's alpha/rank.
        rank_pattern={f"^{re.escape(path)}": own for path, own in ranks.items()},
        alpha_pattern={f"^{re.escape(path)}": scale * own for path, own in ranks.items()},
        fan_in_fan_out=any(isinstance(model.get_submodule(path), Conv1D) for path in found),
        # Relative to the adapter, so that both can be moved; without "./" it would be a hub name.
        base_model_name_or_path=base_path or f"./{BASE}",
        inference_mode=True,
    )
    save_file({name: value.contiguous() for name, value in arrays.items()}, folder / WEIGHTS)
    config.save_pretrained(folder)
    (folder / NOTE).write_text(json.dumps({"base": base, "classes": list(classes)}, indent=1) + "\n")


def with_merged_deltas(own: Factors, merged_deltas: Mapping[str, Tensor], scale: float) -> Factors:
    """One adapter for the sum of the projection's adapter and its merged deltas."""
    outer, inner = own
    read, given = inner.shape[1], outer.shape[0]
    pairs = [
        (merged_deltas[name.removesuffix(lora.A) + lora.B].cpu() / scale, value.cpu())
        for name, value in merged_deltas.items()
        if name.endswith(lora.A)
    ]
    whole = any(not lora.is_adapter(name) for name in merged_deltas)
    if not whole and inner.shape[0] + sum(one.shape[0] for _, one in pairs) <= min(read, given):
        return torch.cat([outer, *(b for b, _ in pairs)], dim=1), torch.cat([inner, *(a for _, a in pairs)])
    # No factors are smaller than the change itself times an identity.
    change = (
        outer.double() @ inner.double() + lora.sum_of({n: v.cpu() for n, v in merged_deltas.items()}) / scale
    )
    if given <= read:
        return torch.eye(given, dtype=outer.dtype), change.to(outer.dtype)
    return change.to(outer.dtype), torch.eye(read, dtype=outer.dtype)


def _joined(model: nn.Module, found: Mapping[str, Factors]) -> dict[str, Factors]:
    """Join the parts of fused projections."""
    joined: dict[str, Factors] = {}
    parts: dict[str, dict[str, Factors]] = {}
    for path, factors in found.items():
        if (fused := fused_part(path)) is None:
            joined[path] = factors
        else:
            parts.setdefault(fused[0], {})[fused[1]] = factors
    for path, own in parts.items():
        rows = {part: lora.sizes(model.get_submodule(f"{path}.{part}"))[1] for part in PARTS}
        blocks = []
        for part, (outer, _) in own.items():
            blocks.append(
                torch.cat([outer if p == part else outer.new_zeros(rows[p], outer.shape[1]) for p in PARTS])
            )
        joined[path] = torch.cat(blocks, dim=1), torch.cat([inner for _, inner in own.values()])
    return joined


def read(model: nn.Module, folder: str, *, rank: int, alpha: float, base: str) -> list[str]:
    """Load a folder's adapters and heads into `model`; returns the loaded names. `UserError` if they do not
    fit the run's: another rank, other projections, another base."""
    import peft

    place = Path(folder).expanduser()
    try:
        config = peft.PeftConfig.from_pretrained(str(place))
        arrays = {name.removeprefix(PREFIX): value for name, value in load_file(place / WEIGHTS).items()}
        note = json.loads((place / NOTE).read_text()) if (place / NOTE).is_file() else {}
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"adapter.path={folder} holds no adapter of peft's ({text}): give one.") from error
    if (
        not isinstance(config, peft.LoraConfig)
        or config.use_dora
        or config.use_rslora
        or config.bias != "none"
    ):
        raise UserError(f"adapter.path={folder} is no plain LoRA (DoRA, rsLoRA, biases): give one that is.")
    if note.get("base", base) != base:
        raise UserError(
            f"The adapters in adapter.path={folder} were trained on other frozen weights than this model's "
            "(their digests differ): give the model that they belong to."
        )
    wanted = lora.adapted(dict(model.named_parameters()))
    found = _factors(arrays, config, wanted)
    if strange := sorted(set(found) ^ set(wanted)):
        which = "has none for" if strange[0] in wanted else "has adapters for"
        raise UserError(
            f"adapter.path={folder} {which} {strange[0]}, unlike this run: choose adapter.targets and "
            "adapter.layers as they were there."
        )
    values = dict(model.named_parameters())
    fresh: dict[str, Tensor] = {}
    for path, (outer, inner) in found.items():
        if inner.shape[0] != rank:
            raise UserError(
                f"adapter.path={folder} has adapters of rank {inner.shape[0]}, and adapter.rank={rank}: set "
                f"adapter.rank={inner.shape[0]}."
            )
        fresh |= {f"{path}.{lora.A}": inner, f"{path}.{lora.B}": outer / (alpha / rank)}
    heads = [name for name, role in roles_of(model).items() if role.kind == "head" and name in arrays]
    fresh |= {name: arrays[name] for name in heads}
    for name, value in fresh.items():
        if value.shape != values[name].shape:
            raise UserError(
                f"adapter.path={folder} has the shape {tuple(value.shape)} for {name}, and this model "
                f"{tuple(values[name].shape)}: give the data and the model that they belong to."
            )
        values[name].data = value.to(values[name])
    return list(fresh)


def _factors(arrays: Mapping[str, Tensor], config: Any, wanted: Sequence[str]) -> dict[str, Factors]:
    """s·B and A from the folder, by the run's projections."""
    from peft.utils.other import get_pattern_key

    found: dict[str, Factors] = {}
    for path in lora.adapted(arrays):
        inner, outer = arrays[f"{path}.{lora.A}"], arrays.get(f"{path}.{lora.B}")
        if outer is None or outer.ndim != 2 or inner.ndim != 2:
            continue
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, path), config.lora_alpha)
        outer = outer * (alpha / inner.shape[0])
        parts = {part: f"{path}.{part}" for part in PARTS if f"{path}.{part}" in wanted}
        if not parts:
            found[path] = outer, inner
            continue
        for part, rows in zip(PARTS, outer.chunk(len(PARTS)), strict=True):
            if part in parts:  # the part's columns, if the parts are concatenated
                used = rows.any(dim=0) if rows.any() else torch.ones(rows.shape[1], dtype=torch.bool)
                found[parts[part]] = rows[:, used], inner[used]
            elif rows.any():
                found[f"{path}.{part}"] = rows, inner
    return found
