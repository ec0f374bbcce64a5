"""A role table in a few lines of YAML (`model.roles`), for an architecture that is not in the built-in table.

    prefix: model                # optional: the name of the headless model inside the whole
    causal: true                 # optional: whether a token attends only to earlier tokens
    roles:
      embed_tokens: embedding
      layers.{layer}.attn.q: query
      layers.{layer}.norm_1: {role: norm, feeds: own}
      layers.{layer}.mlp.*: mlp
      lm_head: head

A pattern is a parameter's name without the prefix and without `.weight` or `.bias`. `{layer}` stands for the
number of a block, and `*` for any part of a name between two dots. `feeds` is the block whose queries and
keys read a norm: its `own`, or the `next` one.
"""

import logging
import re
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.role import KINDS
from fedfrozen_app.models.architectures import Architecture, Row
from fedfrozen_app.models.roles import roles_of, unused_rows

log = logging.getLogger(__name__)
KEYS = ("prefix", "causal", "roles")
WORDS = {"role": KINDS, "feeds": ("own", "next"), "tower": ("vision", "text")}


def read_roles(file: str | Path) -> Architecture:
    """Parse a role file; `UserError` if it is invalid."""
    try:
        found = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"model.roles={file} cannot be read as YAML: {_first_line(error)}") from error
    if not isinstance(found, dict) or not isinstance(found.get("roles"), dict) or not found["roles"]:
        raise UserError(f"model.roles={file} must say roles: by pattern, what the parameters are for.")
    if unknown := sorted(str(key) for key in set(found) - set(KEYS)):
        raise UserError(f"model.roles={file} has the unknown key {unknown[0]}: use {', '.join(KEYS)}.")
    prefix, causal = found.get("prefix", ""), found.get("causal", False)
    if not isinstance(prefix, str) or not isinstance(causal, bool):
        raise UserError(f"model.roles={file}: prefix is a name, and causal is true or false.")
    rows = tuple(_row(pattern, given, file) for pattern, given in found["roles"].items())
    return Architecture(prefix, rows, causal=causal, source=str(file))


def use_roles(model: nn.Module, architecture: Architecture) -> None:
    """Use this table for the model from now on; a warning lists the patterns that match nothing."""
    model.architecture = architecture  # type: ignore[assignment]
    names = list(roles_of(model))
    if unused := [row.written for row in unused_rows(architecture, names)]:
        log.warning(
            "%s: no parameter matches %s; the model has %s, and so on.",
            *(architecture.source, ", ".join(unused), ", ".join(names[:3])),
        )


def _row(pattern: Any, given: Any, file: str | Path) -> Row:
    where = f"model.roles={file}: the pattern {pattern!r}"
    if not isinstance(pattern, str):
        raise UserError(f"{where} is no text: put it between quotation marks.")
    words = {"role": given} if isinstance(given, str) else given
    if not isinstance(words, dict) or "role" not in words:
        raise UserError(f"{where} needs a role: {', '.join(KINDS)}.")
    for key, value in words.items():
        if key not in WORDS:
            raise UserError(f"{where} has the unknown key {key}: use {', '.join(WORDS)}.")
        if value not in WORDS[key]:
            raise UserError(f"{where} has {key} {value!r}: choose one of {', '.join(WORDS[key])}.")
    if pattern.count("{layer}") > 1:
        raise UserError(f"{where} has {{layer}} twice: a parameter is of one block.")
    parts = {"{layer}": r"(?P<layer>\d+)", "*": r"[^.]+"}
    pieces = re.split(r"(\{layer\}|\*)", pattern)
    expression = "".join(parts.get(piece, re.escape(piece)) for piece in pieces)
    return Row(
        expression, words["role"], feeds=words.get("feeds", ""), tower=words.get("tower", ""), written=pattern
    )


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())
