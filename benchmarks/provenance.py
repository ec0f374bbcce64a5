"""Which commit a result names: every new row and result file has one."""

import os

from fedfrozen_app.report.summary import git_commit


def known_commit() -> str | None:
    """Of this checkout; a copy without one is told its commit by FEDFROZEN_COMMIT."""
    return os.environ.get("FEDFROZEN_COMMIT") or git_commit()


def require_commit() -> str:
    """Asked for before anything is measured, so that no result is lost for want of it."""
    found = known_commit()
    if not found:
        raise SystemExit("This is no checkout: set FEDFROZEN_COMMIT to the commit of this copy of the code.")
    return found
