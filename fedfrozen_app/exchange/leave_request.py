"""A site's signed request to be removed from a run: one JSON file, for the people who operate the run.

Signed with the key of the site's certificate, which is in the file. The signed text contains its purpose, so
that no other signature of that key can be used in its place.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import asdict, dataclass, fields
from typing import Protocol

from fedfrozen_app.exchange.strict import Spelled, canonical, read_json

FORMAT, PURPOSE = 1, "take this site out of this run"
MOST, LONGEST = 20_000, 12_000  # characters, of the file and of each text in it


class Signer(Protocol):
    @property
    def credential(self) -> bytes: ...

    def sign(self, text: bytes) -> bytes: ...


class Verifier(Protocol):
    def problem(self, name: str, credential: bytes, text: bytes, signature: bytes) -> str | None: ...


@dataclass(frozen=True)
class LeaveRequest(Spelled):
    site: str
    run: str  # the run's id from its proposal
    proposal: str  # its hash
    reason: str
    written: str

    @property
    def plain(self) -> dict[str, object]:  # type: ignore[override]
        return {"format": FORMAT, "purpose": PURPOSE, **asdict(self)}

    def signed(self, signer: Signer) -> str:
        """The text of the file."""
        parts = {"certificate": signer.credential, "signature": signer.sign(self.text.encode())}
        encoded = {name: base64.b64encode(part).decode("ascii") for name, part in parts.items()}
        return canonical({"request": self.plain, **encoded})


def read_leave_request(text: str, verifier: Verifier) -> LeaveRequest:
    """Parse and verify a request; `ValueError`, as the rest of a sentence, if it is invalid."""
    found = read_json(text, most=MOST, depth=3, longest=LONGEST)
    if not isinstance(found, dict) or set(found) != {"request", "certificate", "signature"}:
        raise ValueError("it is no file of `fedfrozen site leave`")
    own = found["request"]
    names = {one.name for one in fields(LeaveRequest)}
    if not isinstance(own, dict) or set(own) != {*names, "format", "purpose"}:
        raise ValueError("its request has other keys than one of `fedfrozen site leave`")
    if (own["format"], own["purpose"]) != (FORMAT, PURPOSE):
        raise ValueError(f"it is of another format than {FORMAT}, the one that this version reads")
    if not all(isinstance(own[name], str) for name in names):
        raise ValueError("its request holds something else than texts")
    request = LeaveRequest(**{name: own[name] for name in names})
    credential, signature = _decoded(found["certificate"]), _decoded(found["signature"])
    problem = verifier.problem(request.site, credential, request.text.encode(), signature)
    if problem is not None:
        raise ValueError(problem)
    return request


def _decoded(text: object) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("its certificate or signature cannot be read") from error
