"""What watching costs: processor time of a site's endpoint, of a server's, and of the run itself.

A round takes as long as it takes: what counts is the share of a core that is spent beside it. Prometheus asks
every 5 seconds, the site's endpoint looks at its processes every second, and a run writes the states of its
sites at most every second. The SuperNode answers over its real socket. Prometheus itself is not in it.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common import arguments, show, spread, write_result  # noqa: E402

from fedfrozen_app.monitoring.endpoint import scrape  # noqa: E402
from fedfrozen_app.monitoring.families import SERVER, Collected  # noqa: E402
from fedfrozen_app.monitoring.run_numbers import RunNumbers  # noqa: E402
from fedfrozen_app.monitoring.site_source import SiteSource  # noqa: E402
from fedfrozen_app.server.lateness import Lateness  # noqa: E402
from fedfrozen_app.server.membership import Membership  # noqa: E402
from fedfrozen_app.server.presence_writer import PresenceWriter  # noqa: E402
from fedfrozen_app.server.transport import Transport  # noqa: E402
from fedfrozen_app.sites.audit_log import AuditLog  # noqa: E402
from fedfrozen_app.sites.link_meter import LinkMeter  # noqa: E402
from fedfrozen_app.sites.sign import Note  # noqa: E402
from tests.monitoring.kits import make_kit, sent, write_budget  # noqa: E402
from tests.sites.processes import supernode  # noqa: E402

SCRAPE = 5.0  # seconds between two scrapes
ENTRIES, ROWS, SITES, PIECES = 2000, 1000, 50, 20  # of the log, of the run, of the run, of a round's messages
GOAL = 0.01


def cost(work: Callable[[], object], times: int) -> float:
    """Processor seconds of one call, threads of this process included."""
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


def of_a_site(place: Path, repeats: int) -> dict[str, list[float]]:
    kit = make_kit(place / "kit")
    kit.meeting.mkdir(mode=0o700)
    log = AuditLog(kit.audit)
    for number in range(ENTRIES):
        log.write(**sent(round=number, order=str(number)))
    write_budget(kit, 1.0)
    source = SiteSource.of(kit)
    first = cost(lambda: scrape(source), 1)
    found: dict[str, list[float]] = {"first scrape": [first], "scrape": [], "look": []}
    for name in ("supernode", "executor"):
        Note(kit.meeting, name).write("waiting", 300)
    with supernode(kit):
        for _ in range(repeats):
            source.parts.found()["supernode"].up = True  # it is this process
            log.write(**sent(round=ENTRIES, order="last"))
            found["scrape"].append(cost(lambda: scrape(source), 20))
            found["look"].append(cost(source.parts.look, 200))
    return found


def of_a_server(place: Path, repeats: int) -> list[float]:
    """Without the SuperLink's own work on two questions."""
    seconds = {"train": 1.0, "aggregate": 0.1, "evaluate": 0.1, "total": 1.2}
    row = {"clients_ok": SITES, "clients_failed": 0, "bytes_up": 10, "bytes_down": 10, "seconds": seconds}
    lines = [json.dumps({"round": number, **row}) for number in range(ROWS)]
    (place / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = RunNumbers("run", place, ROWS)

    def collect() -> Collected:
        found = Collected(SERVER)
        run.collect(found)
        return found

    scrape(SimpleNamespace(collect=collect))
    return [cost(lambda: scrape(SimpleNamespace(collect=collect)), 20) for _ in range(repeats)]


def of_a_run(place: Path, repeats: int) -> list[float]:
    """What the run's process does each second while it waits: look at all states, and write a file."""
    names = {number: f"site{number}" for number in range(SITES)}
    grid = SimpleNamespace(get_node_ids=lambda: list(names))
    membership = Membership(Transport(grid), sites=names)  # type: ignore[arg-type]
    writer = PresenceWriter(place, membership, Lateness())

    def second() -> None:
        writer._looked = writer._wrote = None
        writer()

    return [cost(second, 50) for _ in range(repeats)]


def main() -> None:
    given = arguments(__doc__ or "", repeats=5).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "run").mkdir()
        site = of_a_site(place, given.repeats)
        server = of_a_server(place / "run", given.repeats)
        run = of_a_run(place / "run", given.repeats)
    meter = LinkMeter()
    piece = [cost(lambda: meter.transferred("up", 10**6, 0.1), 10_000) for _ in range(given.repeats)]
    seconds = {
        "site: scrape": spread(site["scrape"]),
        "site: look at both processes": spread(site["look"]),
        "server: scrape": spread(server),
        "run: states of the sites": spread(run),
        "SuperNode: a piece of a message": spread(piece),
    }
    middle = {name: found.median for name, found in seconds.items()}
    share = {
        "site": middle["site: scrape"] / SCRAPE
        + middle["site: look at both processes"]
        + PIECES * middle["SuperNode: a piece of a message"],
        "server and run": middle["server: scrape"] / SCRAPE + middle["run: states of the sites"],
    }
    checks = {f"{who} under 1 % of a core": value < GOAL for who, value in share.items()}
    figures = {
        "processor_seconds": seconds,
        "first_scrape_seconds": site["first scrape"][0],
        "share_of_a_core": share,
        "entries": ENTRIES,
        "rows": ROWS,
        "sites": SITES,
        "checks": checks,
    }
    path = write_result("monitoring", figures)
    rows = [[name, f"{1000 * value:.3f} ms"] for name, value in middle.items()]
    rows += [[f"{who}, share of a core", f"{100 * value:.2f} %"] for who, value in share.items()]
    show("What watching costs", ["", "processor time"], rows, checks, path)


if __name__ == "__main__":
    main()
