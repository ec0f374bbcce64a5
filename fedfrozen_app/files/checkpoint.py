"""Checkpoints: everything a run needs to continue as if it had never stopped.

A checkpoint is a folder `checkpoints/N`, written under another name and then renamed, so it is complete or
absent:

    model.safetensors     the full global model after round N
    clients.safetensors   what clients keep for themselves, as CLIENT/NAME (only where they keep something)
    strategy.safetensors  what the server keeps beside the model, as OWNER/NAME (only where it does)
                          of very many clients: client_states/ of the run has it (client_segments.py)
    state.json            round, configuration, the round's row, ledger, the hooks' state, and digests of all

No generator has a position to save: every draw is seeded by its purpose and round (see seeds.py).
"""

import logging
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.files.disk import flush, fresh_folder, header, save_tensors
from fedfrozen_app.files.readable import check_readable
from fedfrozen_app.files.seal import sealed, unsealed

if TYPE_CHECKING:  # torch takes seconds to import, and listing runs does not need it
    from torch import Tensor

log = logging.getLogger(__name__)
FORMAT = 2
# The owners of arrays in strategy.safetensors: "carried" ones are sent with every request, "pacing" has
# updates of clients in progress, "broadcast" what clients hold through coded broadcasts.
OWNERS = ("strategy", "server_optimizer", "carried", "pacing", "broadcast")


@dataclass
class Checkpoint:
    round: int
    config: dict[str, Any]
    overrides: list[str]  # that reproduce the configuration
    model: "dict[str, Tensor]"
    row: dict[str, Any]
    ledger: dict[str, list[str]] = field(default_factory=dict)
    hooks: dict[str, Any] = field(default_factory=dict)
    clients: "dict[str, dict[str, Tensor]]" = field(default_factory=dict)
    strategy: "dict[str, Tensor]" = field(default_factory=dict)  # by OWNER/NAME
    metadata: dict[str, str] = field(default_factory=dict)  # of the model's header
    segments: dict[str, str] = field(default_factory=dict)  # of client_states/, in place of `clients`


def write(checkpoint: Checkpoint, folder: Path, keep: int, rollback: Collection[int | None] = ()) -> Path:
    """Write `folder/N` and delete all but the `keep` newest and those of `rollback`."""
    target = folder / str(checkpoint.round)
    part = folder / f".{checkpoint.round}.part"
    with fresh_folder(part):
        save_tensors(checkpoint.model, part / "model.safetensors", checkpoint.metadata)
        clients = {
            f"{client}/{name}": tensor
            for client, arrays in checkpoint.clients.items()
            for name, tensor in arrays.items()
        }
        if clients:
            save_tensors(clients, part / "clients.safetensors")
        if checkpoint.strategy:
            save_tensors(checkpoint.strategy, part / "strategy.safetensors")
        state = {
            "format": FORMAT,
            "round": checkpoint.round,
            "config": checkpoint.config,
            "overrides": checkpoint.overrides,
            "row": checkpoint.row,
            "ledger": checkpoint.ledger,
            "hooks": checkpoint.hooks,
        }
        if checkpoint.segments:
            state["client_segments"] = checkpoint.segments
        (part / "state.json").write_text(sealed(state, *sorted(part.iterdir())))
        for path in part.iterdir():
            flush(path)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    flush(folder)
    for number in numbers(folder)[:-keep]:
        if number not in rollback:
            shutil.rmtree(folder / str(number))
    return target


def segments_of(folder: Path) -> dict[str, str]:
    """The segments that the checkpoint in this folder names; none if it cannot be read."""
    try:
        found: dict[str, str] = unsealed(folder / "state.json", alone=True).get("client_segments", {})
    except DAMAGED:
        return {}
    return found


def last_before(folder: Path, server_round: int) -> int | None:
    """The newest checkpoint of a round before this one; None if there is none."""
    return max((number for number in numbers(folder) if number < server_round), default=None)


def read(folder: Path) -> Checkpoint:
    from safetensors.torch import load_file

    try:
        state = unsealed(folder / "state.json")
        model, metadata = load_file(folder / "model.safetensors"), header(folder / "model.safetensors")
        clients: dict[str, dict[str, Tensor]] = {}
        if (folder / "clients.safetensors").exists():
            for key, tensor in load_file(folder / "clients.safetensors").items():
                client, _, name = key.partition("/")
                clients.setdefault(client, {})[name] = tensor
        strategy_file = folder / "strategy.safetensors"
        return Checkpoint(
            round=int(state["round"]),
            config=state["config"],
            overrides=state["overrides"],
            model=model,
            row=state["row"],
            ledger=state["ledger"],
            hooks=state["hooks"],
            clients=clients,
            strategy=load_file(strategy_file) if strategy_file.exists() else {},
            metadata=metadata,
            segments=state.get("client_segments", {}),
        )
    except (SafetensorError, *DAMAGED) as error:
        raise UserError(
            f"{folder} is no readable checkpoint ({type(error).__name__}: {error}): give a folder "
            "RUN/checkpoints/N that a run wrote; from=RUN/checkpoints/N starts from an older one."
        ) from error


def with_owners(**arrays: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """The arrays of each owner in one dictionary, by OWNER/NAME."""
    return {f"{owner}/{name}": value for owner, named in arrays.items() for name, value in named.items()}


def by_owner(arrays: "Mapping[str, Tensor]") -> "dict[str, dict[str, Tensor]]":
    """The inverse of `with_owners`. Older checkpoints name no owner: all their arrays are the strategy's."""
    found: dict[str, dict[str, Tensor]] = {owner: {} for owner in OWNERS}
    for key, value in arrays.items():
        owner, _, name = key.partition("/")
        if owner in OWNERS and name:
            found[owner][name] = value
        else:
            found["strategy"][key] = value
    return found


def numbers(folder: Path) -> list[int]:
    """The rounds that have a checkpoint, oldest first."""
    try:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def forget_after(folder: Path, number: int) -> None:
    """Delete later rounds: they belong to another run, or this run continues from before them."""
    for later in numbers(folder):
        if later > number:
            shutil.rmtree(folder / str(later))


def newest(run: Path) -> Checkpoint:
    """The newest intact checkpoint; logs which newer ones are damaged."""
    check_readable(run / "checkpoints")
    found, damage = numbers(run / "checkpoints"), []
    for number in reversed(found):
        try:
            checkpoint = read(run / "checkpoints" / str(number))
        except UserError as error:
            damage.append((number, str(error)))
            continue
        if damage:
            rounds = ", ".join(str(number) for number, _ in reversed(damage))
            log.warning(
                "%s/checkpoints: that of round %s is damaged; the newest whole one is that of round %d.",
                *(run, rounds, number),
            )
        return checkpoint
    if damage:
        raise UserError(
            f"{run} holds no whole checkpoint to continue from ({damage[0][1].partition(': give')[0]}): "
            "begin it again, with overwrite=true or another output_dir."
        )
    raise UserError(f"{run} holds no checkpoint to continue from: give the folder of a run that wrote one.")


def newest_state(run: Path) -> dict[str, Any] | None:
    """Only the newest intact state.json, for display; None without one."""
    for number in reversed(numbers(run / "checkpoints")):
        try:
            state = unsealed(run / "checkpoints" / str(number) / "state.json", alone=True)
        except DAMAGED:
            continue
        return state
    return None


def check_private(start: Checkpoint, *, in_process: bool) -> None:
    """Only runs in one process or on Ray write clients' private arrays into checkpoints, and only they can
    restore them."""
    if start.hooks.get("private") and not ((start.clients or start.segments) and in_process):
        raise UserError(
            "Clients of this run keep parts of the model, and Flower forgets those when a run ends: go on "
            "with runtime=inprocess if the run began there, or else start again."
        )
