"""What masks cost: a round with secure_aggregation=on beside a plain one, in seconds, bytes and parts.

`sites`: ten real kits with their certificates, policies, disks and audit logs, each message as bytes, a model
of 20 MB; Flower's processes and the network are left out. The sites work one after another, so that a round
is the sum of what they would do side by side: for the plain round too. They train the default two epochs on
1,640 digits, some 115 rows each; `exchange` is the same with one epoch on a tenth of that, where next to
nothing but the exchange is left. `parts` takes the steps of one client and of the server apart for the same
size. `many` is a hundred simulated sites, all neighbours of all.
"""

import io
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, interleave, ratio, show, spread, write_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fedfrozen_app.config import compose_run
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process
from fedfrozen_app.secure import client
from fedfrozen_app.secure.layout import Arithmetic, SumLayout, decode, encode
from fedfrozen_app.secure.roster import Terms
from fedfrozen_app.secure.round_keys import OnSight, Simulated, new_seed
from fedfrozen_app.secure.sum_up import Collector
from tests.sites.inprocess import BUNDLE, Sites

SITES, VALUES = 10, 5_000_000  # 20 MB of float32
MOST_SECONDS, MOST_BYTES = 1.2, 1.1
MODEL = (
    *("model=vit_tiny", "model.config.hidden_size=256", "model.config.intermediate_size=1024"),
    *("model.config.num_hidden_layers=6", "model.config.num_attention_heads=4"),
)
TRAINED, HARDLY = (1640, 2), (240, 1)  # rows of all sites together, epochs
LINE = 100e6  # bits a second: the transfer is reckoned, for it is left out
MASKS = "secure_aggregation=on"


@dataclass
class Clock:
    """Seconds by what they were spent on."""

    found: dict[str, float] = field(default_factory=dict)

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        done = work()
        self.found[name] = self.found.get(name, 0.0) + time.perf_counter() - began
        return done


def parts(clients: int, values: int) -> dict[str, float]:
    """Seconds of one client for each step (mean over the clients), and of the server."""
    names = [f"site-{number:03}" for number in range(clients)]
    terms, trust, clock = Terms("0" * 32, "0" * 64, 1, 2 / 3, None), OnSight(), Clock()
    layout = SumLayout({"w": torch.Size([values])})
    rules = Arithmetic(32, 1.0, 10.0, 10_000, cohort=clients)
    update = {"w": torch.randn(values) * 0.01}
    identities = {name: Simulated(new_seed()) for name in names}
    collector, sessions, entries, sent = Collector(terms), {}, {}, {}
    for name in names:
        begin = lambda name=name: client.begin(name, terms, identities[name])  # noqa: E731
        sessions[name], entries[name] = clock.time("client: keys", begin)
    roster = clock.time("server: keys and shares", lambda: collector.take_keys(entries).text)
    for name in names:
        share = lambda name=name: client.share(sessions[name], roster, trust, 2)  # noqa: E731
        sessions[name], sent[name] = clock.time("client: shares", share)
    envelopes = clock.time("server: keys and shares", lambda: collector.take_shares(sent))
    collector.expect(layout.head, layout.body)
    for name in names:
        drawn = np.random.default_rng(0)
        rounded = partial(encode, layout, rules, update, 100, {}, drawn)
        vector = clock.time("client: rounding", rounded)
        opened = client.open_envelopes(sessions[name], envelopes[name], collector.present(name))
        mask = lambda opened=opened, vector=vector: client.mask(opened, vector)  # noqa: E731
        sessions[name] = clock.time("client: masks", mask)
        take = lambda name=name, vector=vector: collector.take_vector(name, vector)  # noqa: E731
        clock.time("server: adding up", take)
    survivors = collector.close()
    signed = {}
    for name in names:
        confirm = lambda name=name: client.confirm(sessions[name], survivors, identities[name], 2)  # noqa: E731
        sessions[name], signed[name] = clock.time("client: unmask", confirm)
    for name in names:
        unmask = lambda name=name: client.unmask(sessions[name], signed, trust)  # noqa: E731
        sessions[name], own, keys = clock.time("client: unmask", unmask)
        collector.take_unmasking(name, own, keys)
    total = clock.time("server: taking masks off", collector.finish)
    clock.time("server: to a mean", lambda: decode(layout, rules, total))
    return {n: s / clients if n.startswith("client") else s for n, s in clock.found.items()}


def quietly(work: Callable[[], Any]) -> Any:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return work()


def over_sites(folder: Path, rounds: int, rows: int, epochs: int) -> dict[str, Callable[[], dict]]:
    """A plain and a masked run over the same kits: what a round takes, after the first."""
    names = tuple(f"site-{number}" for number in range(SITES))
    sites = Sites(folder, names=names, rows=rows)
    folder.mkdir()
    sites.prepare()
    for name in names:
        limits = {"rounds_per_day": 100_000, "hellos_per_day": 100_000}
        sites.change(name, "policy.yaml", **limits)
    count = [0]

    def run(*words: str) -> dict:
        count[0] += 1
        more = (f"num_rounds={rounds}", f"strategy.warmup_rounds={rounds}", f"run_id=run-{count[0]}")
        least = [f"runtime.min_nodes={SITES}", "checkpoint.every=0", f"client.local_epochs={epochs}"]
        done = quietly(
            lambda: sites.train(*MODEL, *more, *least, *words, folder=f"run-{count[0]}", bundle=BUNDLE)
        )
        rows = done.rows[2:]  # in the first a site loads its data and the model comes down whole
        seconds = [r["seconds"]["train"] + r["seconds"]["aggregate"] for r in rows]
        found = {
            "seconds": float(np.median(seconds)),
            "bytes": float(np.median([r["bytes_up"] + r["bytes_down"] for r in rows])),
            "arrays": float(sum(rows[0]["bytes_up_by_role"].values())),
        }
        if "secure" in rows[0]:
            steps = rows[0]["secure"]["seconds"]
            found |= {n: float(np.median([r["secure"]["seconds"][n] for r in rows])) for n in steps}
        return found

    return {"plain": run, "masked": lambda: run(MASKS)}


def many(clients: int, rounds: int) -> dict[str, Any]:
    """Simulated sites on digits."""
    words = [
        "model=vit_tiny",
        f"num_clients={clients}",
        f"num_rounds={rounds}",
        "partition=iid",
        "device=cpu",
    ]
    words += ["client.local_steps=1", "runtime.runner=sequential", "checkpoint.every=0", "seed=0"]
    found = {}
    for name, more in {"plain": (), "masked": (MASKS,)}.items():
        with tempfile.TemporaryDirectory() as folder:
            composed = compose_run([*words, *more])
            job = Job(composed, Path(folder))
            quietly(lambda job=job: run_in_process(job))
            row = read_rows(Path(folder))[-1]
        found[name] = {"seconds": row["seconds"]["train"], "bytes": row["bytes_up"] + row["bytes_down"]}
        found[name]["accuracy"] = row["test_accuracy"]
        found[name] |= {"secure": row["secure"]} if "secure" in row else {}
    return found


def main() -> None:
    parser = arguments(__doc__ or "", repeats=3)
    parser.add_argument("--rounds", type=int, default=3, help="of each run over sites; default 3")
    options = parser.parse_args()
    torch.set_num_threads(1)
    single = parts(SITES, VALUES)
    found: dict[str, Any] = {"parts": single}
    lines = [[f"{VALUES * 4 / 1e6:.0f} MB, {name}", f"{value:.4f} s"] for name, value in single.items()]
    for name, rows, epochs in (("sites", *TRAINED), ("exchange", *HARDLY)):
        with tempfile.TemporaryDirectory() as folder:
            turns = interleave(
                over_sites(Path(folder) / "sites", options.rounds, rows, epochs), options.repeats
            )
        found[name] = {"turns": turns} | ratios(turns)
        lines += lines_of(name, turns, found[name])
    found["many"] = many(100, 3)
    path = write_result("secure", found)
    for name, one in found["many"].items():
        lines.append([f"100 simulated sites, {name}: seconds a round", f"{one['seconds']:.2f}"])
        lines.append([f"100 simulated sites, {name}: MB a round", f"{one['bytes'] / 1e6:.2f}"])
    checks = {
        f"seconds at most {MOST_SECONDS} times a plain round": found["sites"]["seconds"].median
        <= MOST_SECONDS,
        f"bytes at most {MOST_BYTES} times a plain round": found["sites"]["bytes"].median <= MOST_BYTES,
    }
    show("What masks cost", ["", ""], lines, checks, path)


def ratios(turns: dict[str, list[dict]]) -> dict[str, Any]:
    """Of the masked round to the plain one, by turns; `online` with the transfer."""
    per_round = {
        "seconds": lambda one: one["seconds"],
        "bytes": lambda one: one["bytes"],
        "online": lambda one: one["seconds"] + one["bytes"] * 8 / LINE,
    }
    return {
        key: ratio(*([take(one) for one in turns[way]] for way in ("masked", "plain")))
        for key, take in per_round.items()
    }


def lines_of(name: str, turns: dict[str, list[dict]], found: dict[str, Any]) -> list[list[str]]:
    lines = [
        [f"{name}, a round of {SITES}, {way}: {key}", f"{spread([one[key] for one in runs]):.4g}"]
        for way, runs in turns.items()
        for key in runs[0]
    ]
    lines.append([f"{name}: masked / plain, seconds", f"{found['seconds']:.3f}"])
    lines.append([f"{name}: masked / plain, bytes", f"{found['bytes']:.4f}"])
    lines.append([f"{name}: the server on a line of {LINE / 1e6:.0f} Mbit/s", f"{found['online']:.3f}"])
    return lines


if __name__ == "__main__":
    main()
