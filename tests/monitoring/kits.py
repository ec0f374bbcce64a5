"""A site's kit with an audit log and a budget, written as the site itself writes them."""

from pathlib import Path

import yaml

from fedfrozen_app.files.seal import sealed
from fedfrozen_app.monitoring.audit_tail import AuditTail
from fedfrozen_app.monitoring.endpoint import scrape
from fedfrozen_app.monitoring.machine import Machine
from fedfrozen_app.monitoring.site_parts import Parts
from fedfrozen_app.monitoring.site_source import SiteSource
from fedfrozen_app.sites.audit_log import AuditLog
from fedfrozen_app.sites.kit import Kit

POLICY = {
    "strategies": ["fedfrozen"],
    "upload_roles": ["mlp"],
    "min_examples": 50,
    "rounds_per_day": 10,
    "max_epsilon": 3.0,
    "bundles": ["b" * 64],
    "monitoring": "activity",
}


def make_kit(folder: Path, **policy: object) -> Kit:
    folder.mkdir(parents=True)
    site = {"name": "north", "superlink": "x:1", "views": {"main": {"kind": "digits"}}, "folder": "var"}
    (folder / "site.yaml").write_text(yaml.safe_dump(site))
    write_policy(folder, **policy)
    return Kit.read(folder)


def write_policy(folder: Path, **policy: object) -> None:
    (folder / "policy.yaml").write_text(yaml.safe_dump(POLICY | policy))


def write_events(kit: Kit, events: list[dict]) -> None:
    log = AuditLog(kit.audit)
    for event in events:
        log.write(**event)


def write_budget(kit: Kit, epsilon: float, delta: float = 1e-6) -> None:
    path = kit.var / "state" / "budget.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        sealed({"runs": {"run": {"epsilon": epsilon, "delta": delta, "rounds": {}}}, "log": "0" * 64})
    )


def source(kit: Kit) -> SiteSource:
    """Without disks and certificates."""
    return SiteSource(kit.folder, Parts(kit.meeting), AuditTail(kit.audit), Machine({}, {}))


def read(kit: Kit, accept: str = "application/openmetrics-text; version=1.0.0") -> str:
    return scrape(source(kit), accept)[0].decode()


def of_the_site(text: str) -> list[str]:
    """The lines about the site itself: how much memory is left depends on whatever else runs."""
    return [
        line for line in text.splitlines() if "fedfrozen_memory" not in line and "fedfrozen_gpu" not in line
    ]


def samples(text: str) -> dict[str, float]:
    """By `name{label="value"}`."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def sent(examples: int = 120, **more: object) -> dict:
    """An update, as `handle_train` writes it."""
    details = {"message": "train", "flower_run": 1, "bundle": "b" * 64, "run": "run", "proposal": "c" * 64}
    return details | {
        **{"event": "sent", "round": 1, "order": "o", "again": False, "examples": examples, "bytes": 1000},
        **{"metrics": {"train_loss": 0.5}, "arrays": {"mlp.weight": "d" * 64}, "epsilon": None},
        **more,
    }
