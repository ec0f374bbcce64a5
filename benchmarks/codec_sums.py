"""What masked sums of few bits take: seconds and bytes, for cohorts of several sizes. Run by codecs.py."""

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from cells import append
from cells import read as read_lines
from provenance import known_commit

from fedfrozen_app.secure import client
from fedfrozen_app.secure.layout import Arithmetic, SumLayout, decode, encode
from fedfrozen_app.secure.roster import Terms
from fedfrozen_app.secure.round_keys import OnSight, Simulated, new_seed
from fedfrozen_app.secure.sum_up import Collector
from fedfrozen_app.secure.vector import Vector, unpacked

BITS, COHORTS = (32, 16, 12, 8), (3, 10, 100)


@dataclass
class Clock:
    seconds: dict[str, float] = field(default_factory=dict)

    def time(self, name: str, work: Any) -> Any:
        began = time.perf_counter()
        done = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        return done


def masked_sum(bits: int, cohort: int, values: int, *, rotate: bool, gone: int = 0) -> dict[str, Any]:
    """One round among parties in this process: seconds of a client and of the server, bytes of an update,
    and whether the sum is that of the same vectors without masks. `gone` leave after they were counted in."""
    names = [f"site-{number:03}" for number in range(cohort)]
    terms, trust, clock = Terms("0" * 32, "0" * 64, 1, 2 / 3, None), OnSight(), Clock()
    layout = SumLayout({"w": torch.Size([values])})
    rules = Arithmetic(bits, 0.05, 10.0, 1, cohort=cohort, rotate=rotate)
    rng = np.random.default_rng(0)
    update = {"w": torch.from_numpy(rng.normal(0, 0.01, values).astype(np.float32))}
    identities, collector = {name: Simulated(new_seed()) for name in names}, Collector(terms)
    sessions, entries, sent = {}, {}, {}
    for name in names:
        sessions[name], entries[name] = client.begin(name, terms, identities[name])
    roster = collector.take_keys(entries).text
    for name in names:
        sessions[name], sent[name] = client.share(sessions[name], roster, trust, 2)
    envelopes = collector.take_shares(sent)
    collector.expect(layout.head, layout.body, bits)
    plain, size = Vector.zeros(layout.head, layout.body, bits), 0
    for number, name in enumerate(names):
        drawn = np.random.default_rng(number)
        vector = clock.time("client", partial(encode, layout, rules, update, 1, {}, drawn))
        plain.add(vector)
        opened = client.open_envelopes(sessions[name], envelopes[name], collector.present(name))
        sessions[name] = clock.time("client", partial(client.mask, opened, vector))
        packed = clock.time("client", partial(vector.packed, bits))
        size = len(packed)
        found = clock.time("server", partial(unpacked, packed, layout.head, bits))
        clock.time("server", partial(collector.take_vector, name, found))
    survivors, signed = collector.close(), {}
    for name in survivors[gone:]:
        sessions[name], signed[name] = client.confirm(sessions[name], survivors, identities[name], 2)
    collector.take_confirmations(len(signed))
    for name in signed:
        sessions[name], own, keys = client.unmask(sessions[name], signed, trust)
        collector.take_unmasking(name, own, keys)
    total = clock.time("server", collector.finish)
    same = decode(layout, rules, total).arrays["w"].equal(decode(layout, rules, plain).arrays["w"])
    return {
        "kind": "sum", "bits": bits, "cohort": cohort, "values": values, "rotate": rotate, "gone": gone,
        "exact": bool(same), "bytes": size, "of_float32": size / (4 * values),
        "client_seconds": clock.seconds["client"] / cohort, "server_seconds": clock.seconds["server"],
        "commit": known_commit(),
    }  # fmt: skip


def sum_all(options: argparse.Namespace) -> list[str]:
    """Every size `repeats` times, in turns; rows that the file has are left out."""
    keys = ("bits", "cohort", "values", "rotate", "gone", "repeat")
    done = {tuple(row[key] for key in keys) for row in read_lines(options.out) if row.get("kind") == "sum"}
    problems = []
    for repeat, cohort, bits in itertools.product(range(options.repeats), options.cohorts, BITS):
        # With 32 bits as today, smaller rings with a rotation.
        rotate, gone = bits < 32, repeat % 2 if cohort > 3 else 0
        if (bits, cohort, options.values, rotate, gone, repeat) in done:
            continue
        row = masked_sum(bits, cohort, options.values, rotate=rotate, gone=gone) | {"repeat": repeat}
        append(options.out, row)
        print(json.dumps(row), flush=True)
        if not row["exact"]:
            problems.append(f"{bits} bits, {cohort} clients: the sum is not exact")
    return problems


def show_sums(rows: Sequence[dict[str, Any]]) -> None:
    """Medians over the repeats."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("kind") == "sum":
            found.setdefault((row["cohort"], row["bits"]), []).append(row)
    for (cohort, bits), own in sorted(found.items()):
        at_client, server = (
            np.median([row[f"{who}_seconds"] for row in own]) for who in ("client", "server")
        )
        exact = "exact" if all(row["exact"] for row in own) else "NOT EXACT"
        share = f"{own[0]['of_float32']:.4f} of the bytes of float32"
        seconds = f"client {at_client:.3f} s, server {server:.3f} s"
        print(f"{cohort} clients, {bits} bits: {exact}, {share}; {seconds}")
