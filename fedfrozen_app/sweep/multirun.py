"""`fedfrozen -m ...`: a Hydra multirun whose folder is the same when the command is given again.

Hydra's own default is a folder with the time in its name: a repeated command would start
over. Ours is named after the swept keys and the fixed settings, so that more values of a swept key (more
seeds) find the runs that are there.
"""

import hashlib
import json
import logging
import math
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from fedfrozen_app.config import compose_config, quoted, resolved, sentence, with_hydra
from fedfrozen_app.config.unused_keys import check_used
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.files import folder_manifest as manifest
from fedfrozen_app.files.disk import is_full
from fedfrozen_app.files.kinds import check_sweep_place
from fedfrozen_app.files.plain_files import check_no_links
from fedfrozen_app.files.status import SweepFailed
from fedfrozen_app.report.compare.collect import collect
from fedfrozen_app.report.compare.command import show, write_all
from fedfrozen_app.report.sweep_clock import over_all_runs
from fedfrozen_app.sweep.member import (
    ASKED,
    TOKEN,
    Asked,
    is_others,
    member,
    run_members,
    wait_for_others,
)
from fedfrozen_app.sweep.sweep_table import Member, members, state_of, sweep_table

log = logging.getLogger(__name__)
ROOT = Path("outputs") / "sweeps"
NAME_LENGTH = 60


def multirun(arguments: list[str]) -> None:
    """Run every combination, then show the outcome of each and compare them."""
    overrides = [word for word in arguments if word not in ("-m", "--multirun")]
    folder, overrides = sweep_folder(overrides)
    check_used_keys(overrides)
    with disk_explained(folder):
        _multirun(folder, overrides)


@contextmanager
def disk_explained(folder: Path) -> Iterator[None]:
    """Turn a full or unwritable disk into a one-sentence error."""
    try:
        yield
    except OSError as error:
        change = "make room there" if is_full(error) else "correct that"
        raise SweepFailed(
            f"{error.filename or folder} could not be written ({error.strerror or error}): {change}, "
            "then the same command continues."
        ) from error


@contextmanager
def launcher_explained() -> Iterator[None]:
    """Turn a cluster's refusal of jobs, or a missing cluster, into a one-sentence error with the reason."""
    try:
        yield
    except RuntimeError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith("submitit"):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__).strip()
        raise UserError(
            f"The cluster took none of these jobs ({reason}): correct hydra.launcher.* (`sinfo` lists "
            "partitions), then the same command continues."
        ) from error


def check_place(folder: Path) -> None:
    """Check that the folder belongs to this sweep or is free. The first run records the sweep in it."""
    check_sweep_place(folder)
    check_no_links(folder)
    known = manifest.read(folder)
    if known is not None and known.damage:  # it lists pages and tables, rewritten at the end
        log.warning("%s/%s was damaged (%s) and is written again.", folder, manifest.FILE, known.damage)
        manifest.rewrite(folder, manifest.Manifest({"is": manifest.SWEEP}))


def _multirun(folder: Path, overrides: list[str]) -> None:
    check_place(folder)
    token = new_token()
    added = [f"hydra.sweep.dir={quote(folder)}", f"+hydra.job.env_set.{TOKEN}={token}"]
    if not any(word.startswith("hydra.output_subdir=") for word in overrides):
        # A run that moves to another number would leave Hydra's files behind.
        added.append("hydra.output_subdir=null")
    later: list[Asked] = []

    def each(composed: DictConfig) -> float | None:
        return member(composed, later)

    count = how_many(overrides)
    # Hydra first composes every combination, which takes some seconds for many runs.
    print(f"A sweep of {counted(count, 'run')} in {folder}.", flush=True)
    try:
        with over_all_runs(count), launcher_explained():
            with_hydra(each, ["-m", *overrides, *added])
            run_members(later, token)
        # A concurrent equal sweep shares the work: wait for the runs that it has started, and run them here
        # if that process dies.
        while busy := [one.folder for one in members(folder, token) if is_others(one.status)]:
            wait_for_others(busy)
            later.clear()
            with_hydra(each, ["-m", *overrides, *added])
            run_members(later, token)
    except KeyboardInterrupt:
        done = sum(one.status.state == "complete" for one in members(folder, token))
        print(
            f"Interrupted with {counted(done, 'run')} complete: the same command continues.", file=sys.stderr
        )
        raise
    finally:
        # Report the runs' results however the launcher ended.
        conclude_table(folder, token)
    try:
        conclude(folder, token)
    finally:
        (folder / ASKED / token).unlink(missing_ok=True)


def how_many(overrides: list[str]) -> int:
    """The number of runs: the product of the numbers of swept values."""
    parsed = OverridesParser.create().parse_overrides(
        [word for word in overrides if not word.startswith("-")]
    )
    return math.prod(len(list(word.sweep_string_iterator())) for word in parsed if word.is_discrete_sweep())


def check_used_keys(overrides: list[str]) -> None:
    """Refuse keys without effect before any run starts, by the first and the last combination. Each run
    checks again."""
    parsed = OverridesParser.create().parse_overrides(
        [word for word in overrides if not word.startswith("-") and not word.startswith("hydra")]
    )
    if any(word.is_sweep_override() and not word.is_discrete_sweep() for word in parsed):
        return
    for place in (0, -1):
        words = [
            f"{str(word.input_line).partition('=')[0]}={list(word.sweep_string_iterator())[place]}"
            if word.is_discrete_sweep()
            else str(word.input_line)
            for word in parsed
        ]
        check_used(words, resolved(compose_config(words)))


def new_token() -> str:
    """With a letter first: Hydra would read 12e4567890123456 as a number."""
    return f"t{os.urandom(8).hex()}"


def sweep_folder(overrides: list[str]) -> tuple[Path, list[str]]:
    """The sweep's folder, and the overrides without those that name it."""
    try:
        parsed = OverridesParser.create().parse_overrides([w for w in overrides if not w.startswith("-")])
    except HydraException as error:
        raise UserError(sentence(error)) from error
    named = [word for word in parsed if word.key_or_group in ("output_dir", "hydra.sweep.dir")]
    if len(named) > 1 or any(word.is_sweep_override() for word in named):
        raise UserError("Give a sweep one folder: either output_dir=DIR or hydra.sweep.dir=DIR, once.")
    overrides = [word for word in overrides if word not in [name.input_line for name in named]]
    where = named[0].value() if named else None
    folder = Path(str(where)) if where else ROOT / sweep_name(word for word in parsed if word not in named)
    return folder.expanduser().resolve(), overrides


def sweep_name(parsed: Iterable[Override]) -> str:
    """ "strategy+seed-1f3a9c02": the swept keys, and a digest of them and of the fixed overrides."""
    overrides = [word for word in parsed if not word.key_or_group.startswith("hydra")]
    swept = [str(word.key_or_group) for word in overrides if word.is_sweep_override()]
    fixed = sorted(str(word.input_line) for word in overrides if not word.is_sweep_override())
    digest = hashlib.sha256(json.dumps([sorted(swept), fixed]).encode()).hexdigest()[:8]
    name = re.sub(r"[^\w.+-]", "-", "+".join(swept))[:NAME_LENGTH]
    return f"{name or 'runs'}-{digest}"


def quote(path: Path) -> str:
    return quoted("", str(path)).removeprefix("=")


def conclude_table(folder: Path, token: str) -> None:
    if found := members(folder, token):
        Console().print(sweep_table(folder, found))


def conclude(folder: Path, token: str) -> None:
    """Compare the complete runs, list the others, and fail if any is incomplete."""
    found = members(folder, token)
    if not found:  # other processes run them all, or the launcher's never started
        raise SweepFailed(f"No run of this sweep is on record in {folder}: the lines above give the reason.")
    if any(one.status.state == "complete" for one in found):
        comparison = collect([one.folder for one in found])
        show(comparison, write_all(comparison, folder))
    raise_failures(found)


def raise_failures(found: list[Member]) -> None:
    failed = [one for one in found if one.status.state != "complete"]
    if not failed:
        return
    first = failed[0]
    kind = UserError if first.status.bad_input else SweepFailed
    raise kind(
        f"{len(failed)} of {counted(len(found), 'run')} failed, the first in {first.folder}: "
        f"{state_of(first.status).rstrip('.')}. The same command repeats only what is not complete."
    )
