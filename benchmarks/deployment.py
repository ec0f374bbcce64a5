"""Real SuperNodes on loopback, with TLS and node keys from provisioned kits: seconds and bytes a round.

`same`: FedFrozen across the switch and SAFL with differential privacy over three sites, each with a folder of
its own, through the proxy, against the same runs in one process.
`executor`: the resident executor against Flower's process for each message, on the same federation, in turns.
`link`: over a link of so many Mbit/s, shared by the sites: full broadcast (FedAvg, everything both ways)
against plan and ledger (FedFrozen, after its switch).
`codecs`: over the same link, FedAvg with float32 both ways and with codecs (docs/codecs.md).
"""

import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common import arguments, ratio, show, spread, write_result  # noqa: E402

from fedfrozen_app.__main__ import run as command  # noqa: E402
from fedfrozen_app.runtimes.flower.processes import free_port  # noqa: E402
from tests.sites.federation import OPEN, SITES, VIEWS, Deployment, federation, write_data  # noqa: E402
from tests.sites.twin import compare_with_one_process  # noqa: E402

MODEL = ["model=vit_tiny", "model.config.intermediate_size=256", "model.config.num_hidden_layers=4"]
LINK = {
    "full broadcast": ("strategy=fedavg",),
    "plan + ledger": ("strategy=fedfrozen", "strategy.warmup_rounds=1"),
}
CODECS = {
    "float32": ("strategy=fedavg",),
    "int8 up": ("strategy=fedavg", "codec=int8"),
    "int8": ("strategy=fedavg", "codec=int8", "codec.down=int8"),
    "int4": ("strategy=fedavg", "codec=int4", "codec.down=int4"),
    "top 10 %": ("strategy=fedavg", "codec=topk", "codec.down=topk"),
}
WORK = ["client.local_steps=2", "runtime.threads=1", "runtime.node_timeout=180", "runtime.min_nodes=3"]


def train(deployment: Deployment, name: str, *words: str) -> list[dict]:
    """One run; the rows of its rounds."""
    folder = deployment.folder / name
    where = [
        f"runtime.server_kit={deployment.kits}/operator",
        f"dataset.path={deployment.folder}/data/server",
    ]
    out = [f"output_dir={folder}", f"hydra.run.dir={folder}"]
    if command(["runtime=deployed", "dataset=images", *MODEL, *WORK, *where, *out, *words]):
        raise SystemExit(f"The run {name} failed: see {deployment.folder}.")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]


def prepare(deployment: Deployment) -> None:
    write_data(deployment.folder / "data", deployment.kits, SITES)
    for site in SITES:
        deployment.change(site, "site.yaml", views=VIEWS)
        deployment.change(site, "policy.yaml", **OPEN)


@contextmanager
def sites_up(deployment: Deployment, *, resident: bool) -> Iterator[None]:
    """The sites with their executors, or as Flower itself would run them."""
    for site in SITES:
        script = deployment.kits / site / "supernode.sh"
        (script.parent / "plain.sh").write_text(
            script.read_text().replace("site node .", "site node . --run-code-of-server")
        )
        deployment.start(site, "supernode" if resident else "plain")
        if resident:
            deployment.start(site, "executor")
    try:
        yield
    finally:
        for site in SITES:
            deployment.kill(f"{site}-{'supernode' if resident else 'plain'}")
            if resident:
                deployment.kill(f"{site}-executor")
        time.sleep(65)  # until the old activations have lapsed


def measure_executor(repeats: int, rounds: int) -> dict:
    """Seconds a round after the first, in which processes start and data are read."""
    found: dict[str, list[float]] = {"resident": [], "process a message": []}
    with tempfile.TemporaryDirectory() as place, federation(Path(place) / "fed", SITES) as deployment:
        prepare(deployment)
        for number in range(repeats):
            for name in found:
                with sites_up(deployment, resident=name == "resident"):
                    rows = train(
                        deployment,
                        f"{name.split()[0]}{number}",
                        f"num_rounds={rounds}",
                        f"run_id=run{number}",
                    )
                found[name].append(statistics.mean(row["seconds"]["total"] for row in rows[1:]))
    return found


class Throttle:
    """A TCP relay that lets so many bytes a second through each way, over all connections together."""

    def __init__(self, port: int, target: int, mbit: float) -> None:
        self.port, self.target = port, target
        self.rate = mbit * 1e6 / 8
        self.bytes = 0

    def __enter__(self) -> "Throttle":
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        """The daemon thread ends with the process."""

    async def _serve(self) -> None:
        self._free = {"up": 0.0, "down": 0.0}
        server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        async with server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:  # the SuperLink has ended, and a site still asks for it
            writer.close()
            return
        await asyncio.gather(
            self._pass(reader, far_writer, "up"),
            self._pass(far_reader, writer, "down"),
            return_exceptions=True,
        )

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        try:
            while piece := await reader.read(8192):
                self.bytes += len(piece)
                now = time.monotonic()
                self._free[way] = max(self._free[way], now) + len(piece) / self.rate
                await asyncio.sleep(max(0.0, self._free[way] - now))
                writer.write(piece)
                await writer.drain()
        finally:
            writer.close()


def measure_link(mbit: float, rounds: int, cases: dict[str, tuple[str, ...]]) -> dict:
    """By case: seconds, counted bytes and bytes on the wire of a round, all sites together."""
    found = {}
    with tempfile.TemporaryDirectory() as place, federation(Path(place) / "fed", SITES) as deployment:
        prepare(deployment)
        port = free_port()
        for site in SITES:
            path = deployment.kits / site / "site.yaml"
            path.write_text(path.read_text().replace(f":{deployment.port}", f":{port}"))
        with Throttle(port, deployment.port, mbit) as link:
            for site in SITES:
                deployment.start_site(site)
            for number, (name, words) in enumerate(cases.items()):
                before = link.bytes
                more = (f"num_rounds={rounds}", f"run_id=run{number}")
                rows = train(deployment, f"run{number}", *words, *more)
                late = rows[2:]  # after the switch, and after the round that brings the last kernel
                found[name] = {
                    "seconds": [row["seconds"]["total"] for row in late],
                    "bytes_up": late[-1]["bytes_up"],
                    "bytes_down": late[-1]["bytes_down"],
                    "wire_bytes_per_round": (link.bytes - before) // rounds,
                }
    return found


def main() -> None:
    parser = arguments(__doc__ or "", repeats=3)
    parser.add_argument("what", choices=("same", "executor", "link", "codecs"), help="which of them")
    parser.add_argument("--rounds", type=int, default=5, help="of each run (default 5, at least 4)")
    parser.add_argument("--mbit", type=float, default=10, help="of the link (default 10)")
    options = parser.parse_args()
    line = list(sys.argv)
    if options.what == "same":
        with tempfile.TemporaryDirectory() as place:
            figures = compare_with_one_process(Path(place))
        runs = figures["runs"]
        checks = {
            "weights as in one process": all(run.get("difference", 0) <= 1e-6 for run in runs.values()),
            "what goes beyond the budget is refused": all(figures["refused"].values()),
        }
        columns = ["run", "seconds", "largest difference of a weight", "epsilon"]
        rows = [
            [name, f"{run['seconds']:.0f}", str(run.get("difference", "-")), str(run["epsilon_max"] or "-")]
            for name, run in runs.items()
        ]
    elif options.what == "executor":
        found = measure_executor(options.repeats, options.rounds)
        factor = ratio(found["process a message"], found["resident"])
        figures = {"seconds_per_round": {k: spread(v) for k, v in found.items()}, "ratio": factor}
        checks = {"a resident round takes at most a third": factor.median >= 3}
        rows = [[name, f"{spread(values):.1f}"] for name, values in found.items()]
        rows.append(["process / resident", f"{factor:.1f}"])
        columns = ["sites", "seconds a round"]
    else:
        codecs = options.what == "codecs"
        link = measure_link(options.mbit, options.rounds, CODECS if codecs else LINK)
        figures = {"mbit": options.mbit, "codecs" if codecs else "strategies": link}
        full, plan = (link[name] for name in (("float32", "int8") if codecs else LINK))
        fewer = all(plan[way] < full[way] for way in ("bytes_up", "bytes_down"))
        checks = {"int8 sends" if codecs else "plan and ledger send": fewer}
        checks = {f"{words} fewer bytes both ways": found for words, found in checks.items()}
        columns = [
            "what travels",
            "seconds a round",
            "bytes up",
            "bytes down",
            "on the wire, mean of all rounds",
        ]
        rows = [
            [
                name,
                f"{spread(value['seconds']):.1f}",
                f"{value['bytes_up']:,}",
                f"{value['bytes_down']:,}",
                f"{value['wire_bytes_per_round']:,}",
            ]
            for name, value in link.items()
        ]
    sys.argv = line  # training has written its own
    path = write_result(f"deployment_{options.what}", figures)
    show(f"Deployment: {options.what}", columns, rows, checks, path)


if __name__ == "__main__":
    main()
