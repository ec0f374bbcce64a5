"""Rounds an hour over three real sites, one of them ten times slower, under each pacing (docs/pacing.md).

Kits, TLS, proxy and executors on this machine. The slow site's training takes ten times as long as it does by
itself; the messages around it take the time that they take. Rounds in which processes start do not count.
"""

import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common import arguments, show, write_result  # noqa: E402
from deployment import prepare, train  # noqa: E402

from tests.sites.federation import SITES, federation  # noqa: E402

SLOW, TIMES = "west", 10
HOOK = ROOT / "tests" / "sites" / "slowed"
PACINGS = {
    "synchronous": (),
    "deadline": ("pacing=deadline", "pacing.share=0.6"),
    "buffered": ("pacing=buffered", "pacing.concurrency=3", "pacing.buffer=2"),
}


def measure(rounds: int, steps: int) -> dict[str, dict]:
    found = {}
    with tempfile.TemporaryDirectory() as place, federation(Path(place) / "fed", SITES) as deployment:
        prepare(deployment)
        for site in SITES:
            deployment.start(site, "supernode")
            slowed = ("env", f"PYTHONPATH={HOOK}:{ROOT}", f"SLOWED={TIMES}x") if site == SLOW else ()
            deployment.start(site, "executor", *slowed)
        for name, words in PACINGS.items():
            own = ("strategy=fedavg", f"client.local_steps={steps}", f"num_rounds={rounds}")
            rows = train(deployment, name, *words, *own, f"run_id={name}")
            seconds = [row["seconds"]["total"] for row in rows[1:]]
            used = [one for row in rows[1:] for one in row.get("pacing", {}).get("used", ())]
            found[name] = {
                "seconds": seconds,
                "rounds_per_hour": 3600 / statistics.mean(seconds),
                "replies_of_the_slow_site": sum(client == SLOW for client, _ in used)
                if words
                else rounds - 1,
                "largest_staleness": max((age for _, age in used), default=0),
                "clients_failed": sum(row["clients_failed"] for row in rows),
            }
    return found


def main() -> None:
    parser = arguments(__doc__ or "", repeats=1)
    parser.add_argument("--rounds", type=int, default=12, help="of each run (default 12)")
    parser.add_argument("--steps", type=int, default=20, help="local steps of a request (default 20)")
    options = parser.parse_args()
    line = list(sys.argv)
    found = measure(options.rounds, options.steps)
    rates = {name: value["rounds_per_hour"] for name, value in found.items()}
    checks = {
        f"{name} has more rounds an hour than synchronous": rates[name] > rates["synchronous"]
        for name in ("deadline", "buffered")
    }
    checks["nobody failed"] = not any(value["clients_failed"] for value in found.values())
    rows = [
        [name, f"{value['rounds_per_hour']:.0f}", str(value["replies_of_the_slow_site"])]
        for name, value in found.items()
    ]
    sys.argv = line  # training has written its own
    path = write_result("deployment_pacing", {"slower": TIMES, "steps": options.steps, "pacings": found})
    columns = ["pacing", "rounds an hour", "replies of the slow site"]
    show("Deployment: pacing", columns, rows, checks, path)


if __name__ == "__main__":
    main()
