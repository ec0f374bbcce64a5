"""The heads of the sites' audit logs, as each reply reports them: `anchors.jsonl` in the run's folder.

A site whose log is truncated later cannot undo what it reported (`site audit --anchors`).
"""

import datetime
import json
import re
from dataclasses import dataclass
from pathlib import Path

DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class AnchorFile:
    path: Path

    def add(self, site: str, digest: str) -> None:
        """Append the value, if it is a digest."""
        if not DIGEST.fullmatch(digest):
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": now, "site": site, "digest": digest}) + "\n")
