"""The request that `fedfrozen site leave` wrote, checked against the run that it names."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fedfrozen_app.core.certificates import read_trusted
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import printable, quoted
from fedfrozen_app.exchange.leave_request import LeaveRequest, read_leave_request
from fedfrozen_app.files.folders import authorities_file
from fedfrozen_app.launch import finished
from fedfrozen_app.secure.certified import OfThisFederation


@dataclass(frozen=True)
class Asked:
    request: LeaveRequest
    sha256: str  # of the file

    @property
    def sentence(self) -> str:
        reason = f" ({quoted(self.request.reason, 200)})" if self.request.reason else ""
        return f"{self.request.site} asked for it on {printable(self.request.written)}{reason}."

    @property
    def record(self) -> dict[str, str]:
        """The request's entry in the statement."""
        own = {key: str(value) for key, value in self.request.plain.items() if key != "format"}
        return own | {"sha256": self.sha256}


def read_request(run: Path, path: Path) -> Asked:
    """`UserError` unless a site of the run's federation signed it, for this run."""
    authorities = authorities_file(run)
    if not authorities.exists():
        raise UserError(f"{run} ran over no real sites, and --request is what one wrote: give --client NAME.")
    try:
        content = path.read_bytes()
        verifier = OfThisFederation(tuple(read_trusted(authorities)))
        request = read_leave_request(content.decode("utf-8"), verifier)
    except OSError as error:
        raise UserError(f"--request {path} cannot be read ({error.strerror}): give another file.") from error
    except ValueError as error:
        raise UserError(
            f"--request {path} cannot be used ({printable(str(error))}): have the site send it again."
        ) from error
    known = finished(run)["config"].get("run_id")
    if request.run != known:
        raise UserError(
            f"--request {path} is about the run {quoted(request.run, 60)}, and {run} is "
            f"{quoted(str(known), 60)}: give the folder of that run."
        )
    return Asked(request, hashlib.sha256(content).hexdigest())
