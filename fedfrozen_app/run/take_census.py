"""Run a census, the same in every runtime: send requests, merge answers, advise, write."""

import json
import logging
from pathlib import Path
from typing import Any

from fedfrozen_app.census.advice import advise
from fedfrozen_app.census.merge import merge
from fedfrozen_app.core.errors import RunFailed
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.report.census_page import write_page
from fedfrozen_app.server.asking import Asking

log = logging.getLogger(__name__)


def take_census(asking: Asking, folder: Path) -> dict[str, Any]:
    """Write census.json and census.html, and return the content of the former."""
    asking.run()
    if not asking.answers:
        reasons = "; ".join(f"{name}: {why}" for name, why in asking.refused.items())
        raise RunFailed(f"No site answered the census: {reasons}.")
    found = merge(asking.answers, asking.refused)
    found["asked"] = {"hash": asking.ask.hash, **asking.ask.plain}
    found["advice"] = advise(found)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "census.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
    write_page(found, folder)
    log.info("Wrote %s", folder / "census.html")
    return found
