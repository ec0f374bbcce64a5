"""Assign every parameter its role.

Strategies use roles ("freeze the queries and keys"), never parameter names. That works only if every
parameter has exactly one role, so a name that is not in the architecture's table (architectures.py) is an
error, not a guess. A module may also define its parameters' roles by a method or an attribute ``roles``: by
name a `Role`, or plainly "mlp", or ("mlp", 3) for a parameter of the fourth layer.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from fedfrozen_app.core.deprecated import old_names
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.role import KINDS, Role
from fedfrozen_app.models.architectures import ARCHITECTURES, Architecture, Row, architecture_of

_FUSED = re.compile(
    r"(?:.*\.)?(?:in_proj_(?:weight|bias)"
    r"|(?:qkv|qkv_proj|Wqkv|query_key_value|c_attn)(?:\.(?:weight|bias))?)"
)


def roles_of(model: nn.Module) -> dict[str, Role]:
    """One role for each name of `model.named_parameters()`, in that order."""
    names = [name for name, _ in model.named_parameters()]
    what = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
    _refuse_statistics(what, model)
    if (own := getattr(model, "roles", None)) is not None:
        _refuse_fused(what, names)
        return _own_roles(what, names, own() if callable(own) else own)
    architecture = architecture_of(model)
    if architecture is None:
        _refuse_fused(what, names)
        raise UserError(
            f"the architecture '{what}' has no role table: add its rows in a file (model.roles=FILE), let "
            f"the module say its `roles`, or choose one of {', '.join(ARCHITECTURES)}"
        )
    matched = {name: _match(architecture, what, name) for name in names}
    _refuse_fused(what, [name for name, found in matched.items() if found is None or found[0].kind != "head"])
    if nameless := [name for name, found in matched.items() if found is None]:
        raise UserError(_nameless(architecture, what, nameless))
    found = {name: row for name, row in matched.items() if row is not None}
    blocks: dict[str, int] = {}
    for row, layer in found.values():
        if layer is not None:
            blocks[row.tower] = max(blocks.get(row.tower, 0), layer + 1)
    return {
        name: Role(
            row.kind,
            layer,
            row.tower,
            _feeds_attention(row, layer, blocks.get(row.tower, 0), names),
        )
        for name, (row, layer) in found.items()
    }


def unused_rows(architecture: Architecture, names: Collection[str]) -> list[Row]:
    """The rows that none of these names matches."""
    short = [_short(architecture, name) for name in names]
    return [row for row in architecture.rows if not any(re.fullmatch(row.pattern, name) for name in short)]


def _nameless(architecture: Architecture, what: str, names: list[str]) -> str:
    if architecture.source:
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        return f"{len(names)} parameters of '{what}' match no pattern of {architecture.source}: {shown}"
    return (
        f"the parameter '{names[0]}' of the architecture '{what}' has no role: add a row for it to "
        "ARCHITECTURES in fedfrozen_app/models/architectures.py, or give a table of your own with "
        "model.roles=FILE"
    )


def _own_roles(what: str, names: Collection[str], own: Mapping[str, Any]) -> dict[str, Role]:
    """The roles that a module defines itself, checked: one known role for every parameter."""
    found = {}
    for name in names:
        if name not in own:
            raise UserError(f"'{what}' names no role for its parameter '{name}': add it to its roles")
        given = own[name]
        role = given if isinstance(given, Role) else Role(*((given,) if isinstance(given, str) else given))
        if role.kind not in KINDS:
            raise UserError(
                f"'{what}' calls its parameter '{name}' a '{role.kind}', which is no role: choose one of "
                f"{', '.join(KINDS)}"
            )
        found[name] = role
    return found


def _short(architecture: Architecture, name: str) -> str:
    short = name.removeprefix(architecture.prefix + ".")
    return short.removesuffix(".weight").removesuffix(".bias")


def _match(architecture: Architecture, what: str, name: str) -> tuple[Row, int | None] | None:
    """The row for this name, and the number of its block; None if there is no row."""
    short = _short(architecture, name)
    matches = [(row, m) for row in architecture.rows if (m := re.fullmatch(row.pattern, short))]
    if not matches:
        return None
    if len(matches) > 1:
        patterns = " and ".join(row.written or row.pattern for row, _ in matches)
        if architecture.source:
            raise UserError(f"'{name}' matches two patterns of {architecture.source}: {patterns}")
        raise RuntimeError(f"'{name}' of '{what}' has two roles, by {patterns}")
    row, match = matches[0]
    layer = match.groupdict().get("layer")
    return row, None if layer is None else int(layer)


def _feeds_attention(row: Row, layer: int | None, blocks: int, names: Collection[str]) -> bool:
    if row.unless and any(row.unless in name.split(".") for name in names):
        return False
    if row.feeds == "next":
        following = 0 if layer is None else layer + 1
        return following < blocks  # the last block's output norm feeds the head
    return row.feeds == "own"


def _refuse_fused(what: str, names: Collection[str]) -> None:
    for name in names:
        if _FUSED.fullmatch(name):
            raise UserError(
                f"the parameter '{name}' of '{what}' holds query, key and value in one tensor, so "
                "freezing the kernel would freeze the value too: split it first by split_fused, "
                "adding a row for it to FUSED in fedfrozen_app/models/split.py where it has none"
            )


def _refuse_statistics(what: str, model: nn.Module) -> None:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        if name in parameters or not isinstance(tensor, torch.Tensor):
            continue
        if tensor.is_floating_point():
            raise UserError(
                f"the buffer '{name}' of '{what}' is a running statistic, which would be neither "
                "trained nor averaged: use a model without one (LayerNorm in place of BatchNorm)"
            )


def is_causal(model: nn.Module) -> bool:
    """Whether a token attends only to earlier tokens."""
    found = architecture_of(model)
    return found is not None and found.causal


def head_of(model: nn.Module, roles: Mapping[str, Role]) -> nn.Module | None:
    """The module that maps a row's representation to its scores; None if the model has none."""
    heads = [name for name, role in roles.items() if role.kind == "head"]
    return model.get_submodule(heads[-1].rpartition(".")[0]) if heads else None


# Old names, for one release.
__getattr__ = old_names(
    __name__,
    KERNEL="fedfrozen_app.exchange.role:KERNEL",
    is_embedding="fedfrozen_app.exchange.role:is_embedding",
)
