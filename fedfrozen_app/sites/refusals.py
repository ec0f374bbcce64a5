"""Why a site does not carry out a request. The reason is for the site's own log: the server gets one fixed
sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

from fedfrozen_app.secure.roster import ProtocolError


class RequestRefused(Exception):
    """Its text is the reason."""

    event = "refused"  # in the audit log


class RequestDeclined(RequestRefused):
    """The client's own training code declined, not the policy."""

    event = "declined"


class LimitReached(RequestRefused):
    """A limit of the day is used up. Not written to the audit log, or a server could fill the disk."""


@contextmanager
def refusing_what_masks_refuse() -> Iterator[None]:
    """Turn a `ProtocolError` of the masking protocol into a refusal."""
    try:
        yield
    except ProtocolError as error:
        raise RequestRefused(str(error)) from None
