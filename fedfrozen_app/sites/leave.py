"""`fedfrozen site leave RUN [KIT]`: leave a run, and ask its operators to forget this site's updates.

KIT/leave-RUN.json    the request, signed with the key of the site's certificate: send it to the operators
"""

import re
from collections.abc import Sequence
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import printable, quoted
from fedfrozen_app.core.streams import print_text
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.exchange.leave_request import LeaveRequest
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.sites import decide
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.history import PastRun, past_runs
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.masking import Certified

UPDATE = "sent"  # the event of an update


def leave(words: list[str]) -> None:
    given = parse("site leave", words)
    kit = Kit.read(given.kit)
    left = runs_called(given.run, past_runs(read_audit(kit.audit)))
    path = given.out or kit.folder / f"leave-{re.sub(r'[^A-Za-z0-9_-]', '_', left[0].run)[:60]}.json"
    if path.exists():
        raise UserError(f"{path} exists already: send that one, or give another file with --out.")
    signer = Certified.read(kit.folder)  # without a key nothing is decided
    written = decide.leave(kit, left[0].run, [one.proposal for one in left], given.reason)
    request = LeaveRequest(kit.name, left[0].run, left[0].proposal, written.reason, written.time)
    replace_file(path, request.signed(signer) + "\n")
    rounds, count = sorted(set().union(*(one.rounds for one in left))), sum(one.messages for one in left)
    print_text(
        f"The run {printable(left[0].run)} gets no further reply from {kit.name}. It has {count} updates of "
        f"this site's, from round {rounds[0]} on.\n"
        f"Wrote {path}: send it to the operators, who run fedfrozen forget RUN --request {Path(path).name}"
    )


def runs_called(word: str, past: Sequence[PastRun]) -> list[PastRun]:
    """What left under this run's id, or a proposal's hash; the latest proposal first."""
    trained = [one for one in past if one.kind == UPDATE]
    ids = {one.run for one in trained if word == one.run or (len(word) > 3 and one.proposal.startswith(word))}
    if len(ids) > 1:
        raise UserError(f"{quoted(word, 60)} names {len(ids)} runs: give more characters, or the run's id.")
    if not ids:
        known = ", ".join(dict.fromkeys(quoted(one.run, 60) for one in trained[:6]))
        raise UserError(
            f"No update of this site went to a run {quoted(word, 60)}: "
            + (f"give one of {known}." if known else "it has sent none to any run.")
        )
    return [one for one in trained if one.run in ids]
