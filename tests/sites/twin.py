"""A run over deployed sites, and its twin over copies of the same kits in this process."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.kit_writer import bundle_digest
from tests.comparing import is_key_bias
from tests.conftest import Run
from tests.sites.federation import OPEN, SITES, VIEWS, Deployment, federation, write_data
from tests.sites.inprocess import TINY, Sites

FEDFROZEN = ("num_rounds=4", "strategy.warmup_rounds=2")
SAFL = ("strategy=safl", "model=vit_tiny", "strategy.top_k=1", "num_rounds=2", "privacy=dp_sgd")
PRIVATE = {"safl, seeded noise": "privacy.seeded_noise=true", "safl, private": "privacy.seeded_noise=false"}


def words(deployment: Deployment, folder: Path, *more: str) -> list[str]:
    """The command line of a run, on the server's machine."""
    return [
        *TINY,
        "runtime=deployed",
        f"runtime.server_kit={deployment.kits}/operator",
        "runtime.round_timeout=120",
        "dataset=images",
        f"dataset.path={deployment.folder}/data/server",
        f"output_dir={folder}",
        f"hydra.run.dir={folder}",
        "client.local_epochs=2",
        *more,
    ]


def join(deployment: Deployment, sites: Sequence[str], *, network: bool = True) -> None:
    write_data(deployment.folder / "data", deployment.kits, sites, rows=240)
    for site in sites:
        deployment.change(site, "site.yaml", views=VIEWS)
        deployment.change(site, "policy.yaml", **OPEN)
        deployment.start_site(site, network=network)
    for site in sites:
        deployment.wait_for_line(f"{site}-supernode", "SuperNode ID")


def the_same_in_process(deployment: Deployment, sites: Sequence[str], folder: Path, *more: str) -> Run:
    """The run's twin over copies of the same kits, in this process."""
    copy = Sites(folder, names=sites)
    for part in ("kits", "data"):
        ignore = shutil.ignore_patterns("var", "flwr", "run")
        shutil.copytree(deployment.folder / part, folder / part, ignore=ignore)
    digest = bundle_digest(folder)
    least = [word for word in copy.words() if not word.startswith("runtime.min_nodes")]
    copy.words = lambda *extra: [*least, "client.local_epochs=2", *more, *extra]  # type: ignore[method-assign]
    return copy.train(bundle=digest)


def largest_difference(one: Run, other: Run) -> float:
    """Of any weight but the key biases, which softmax ignores."""
    return max(
        (value - other.model[name]).abs().max().item()
        for name, value in one.model.items()
        if not is_key_bias(name)
    )


COURSE = ("round", "stage", "clients", "clients_failed", "bytes_up_by_role", "bytes_down_by_role")


def same_course(one: Run, other: Run, keys: Sequence[str] = COURSE) -> None:
    """The same clients, failures and bytes in every round."""
    for row, twin in zip(one.rows, other.rows, strict=True):
        for key in keys:
            assert row.get(key) == twin.get(key), (key, row["round"])


def compare_with_one_process(place: Path) -> dict:
    """By run: its seconds, the largest difference of a weight from its twin's, and the epsilon it cost.

    Private noise cannot be drawn twice, so the private run has no twin. At last a run asks for more epsilon
    than is left: what each site wrote into its audit log.
    """
    runs = {"fedfrozen": FEDFROZEN} | {n: (*SAFL, w, "privacy.epsilon=3") for n, w in PRIVATE.items()}
    found: dict[str, dict] = {}
    with federation(place / "fed", SITES) as deployment:
        join(deployment, SITES)
        for number, (name, overrides) in enumerate(runs.items()):
            more = (*overrides, "runtime.min_nodes=3")
            began = time.perf_counter()
            if command(words(deployment, place / f"run{number}", *more)):
                raise SystemExit(f"The run {name} failed: see {place}.")
            run = Run(place / f"run{number}")
            found[name] = {
                "overrides": list(more),
                "seconds": time.perf_counter() - began,
                "clients_ok": [row["clients_ok"] for row in run.rows[1:]],
                "bytes_up": [row["bytes_up"] for row in run.rows[1:]],
                "bytes_down": [row["bytes_down"] for row in run.rows[1:]],
                "accuracy": run.rows[-1]["test_accuracy"],
                "epsilon_max": run.rows[-1].get("epsilon_max"),
            }
            if name != "safl, private":
                (place / f"twin{number}").mkdir()
                twin = the_same_in_process(deployment, SITES, place / f"twin{number}", *more)
                # A later run is sent less: the sites still hold what the first one brought.
                same_course(run, twin, COURSE[:-1] if number else COURSE)
                found[name]["difference"] = largest_difference(run, twin)
        greedy = words(deployment, place / "greedy", *SAFL, "privacy.epsilon=6", "runtime.min_nodes=3")
        greedy.append("runtime.node_timeout=20")  # refused before it begins: nobody else will come
        if not command(greedy):
            raise SystemExit("A run that asked for more epsilon than is left was not refused.")
        logs = {site: read_audit(Kit.read(deployment.kits / site).audit) for site in SITES}
        refused = {site: log[-1].get("reason") for site, log in logs.items()}
    return {"runs": found, "refused": refused}
