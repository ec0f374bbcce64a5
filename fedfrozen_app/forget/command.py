"""`fedfrozen forget RUN --client NAME`: rerun all rounds since a client's first one without it."""

import shlex
from pathlib import Path

from fedfrozen_app.config import ComposedConfig, quoted
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.signing import read_private
from fedfrozen_app.core.streams import print_text
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.files import checkpoint, status
from fedfrozen_app.files.checkpoint import Checkpoint
from fedfrozen_app.files.folders import check_free
from fedfrozen_app.forget.asked import read_request
from fedfrozen_app.forget.rollback import Rollback, plan_rollback
from fedfrozen_app.forget.statement import FILE, write_statement
from fedfrozen_app.launch import check_writable, execute, run_folder
from fedfrozen_app.run.job import Job, fork_start
from fedfrozen_app.run.stored_config import stored_config


def forget(arguments: list[str]) -> None:
    given = parse("forget", arguments)
    run, _ = run_folder("forget", [given.run])
    status.check_unowned(run)
    key = None if given.key is None else read_private(given.key)
    asked = None if given.request is None else read_request(run, given.request)
    if (given.client is None) == (asked is None):
        raise UserError("Say who leaves: --client NAME, or --request FILE of a site, and not both.")
    client = given.client if asked is None else asked.request.site
    rollback = plan_rollback(run, client, from_start=given.from_start)
    if asked is not None:
        print_text(asked.sentence)
    print_text(rollback.cost())
    if given.dry_run:
        return
    folder = (given.out or run.with_name(f"{run.name}-without-{rollback.client}")).expanduser().resolve()
    composed = without_client(rollback, folder, trusted=given.trust_folder)
    if not is_done(folder, composed):
        run_again(composed, folder)
    statement = write_statement(rollback, folder, composed.config, key, asked)
    print_text(f"Wrote {folder / FILE}{'' if key is None else ', signed'}.")
    if held := statement["files_that_still_hold_it"]:
        print_text(f"{run} still holds the client's part in {', '.join(held)}: delete that folder.")


def without_client(rollback: Rollback, folder: Path, *, trusted: bool) -> ComposedConfig:
    """The configuration of the run without the client, with its own output folder."""
    run, had = rollback.run, dict(rollback.summary["config"])
    words = shlex.split(rollback.summary["command"])[1:]
    extra = [
        "from=null" if rollback.start is None else quoted("from", str(rollback.start)),
        f"exclude_clients=[{','.join(quoted_name(name) for name in rollback.excluded)}]",
        quoted("output_dir", str(folder)),
        "overwrite=false",
        "run_id=null",  # a new id: approvals, budgets and state at the sites belong to the old run
        *enough_sites(rollback),
    ]
    composed = stored_config(run, words, had, extra, trusted=trusted, trains=True)
    return composed.with_absolute_paths()


def enough_sites(rollback: Rollback) -> list[str]:
    """Overrides for the number of sites: a run that waits for all sites must not wait for the one that
    left."""
    config = rollback.summary["config"]
    if config["runtime"]["name"] != "deployed":
        return []
    left = len(rollback.left)
    wanted = config["runtime"].get("min_nodes") or config.get("num_clients") or 2
    if not left:
        raise UserError(
            f"Nobody is left in {rollback.run} without {rollback.client}: delete its model, and start a new "
            "run with other sites."
        )
    return [f"runtime.min_nodes={left}"] if wanted > left else []


def quoted_name(name: str) -> str:
    return name if name.isdecimal() else quoted("", name).removeprefix("=")


def is_done(folder: Path, composed: ComposedConfig) -> bool:
    """Whether an earlier call of the same command completed the run, so that only the statement is
    missing."""
    known = status.read(folder)
    return (
        known is not None
        and known.state == "complete"
        and known.digest == status.digest_of(composed.resolved)
    )


def run_again(composed: ComposedConfig, folder: Path) -> None:
    """Run from the checkpoint, or from the newest checkpoint of an interrupted earlier call."""
    known = status.read(folder)
    same = known is not None and known.digest == status.digest_of(composed.resolved)
    start: Checkpoint | None
    if same and checkpoint.numbers(folder / "checkpoints"):
        start, composed = checkpoint.newest(folder), composed.continuing()
    else:
        check_writable(folder)
        check_free(folder, overwrite=same)  # killed before its first checkpoint: nothing is lost
        start = fork_start(composed.config)
    with status.recorded(folder, composed.resolved, composed.overrides):
        execute(Job(composed, folder, start))
