"""Random and hostile sequences of messages to a site that is killed between any two states.

    python benchmarks/request_sequences.py --count 20000 --workers 2

Sequences and what is checked of them are those of `tests/sites/request_sequences.py`: eight proposals, three
of them masked, one whose noise does not fit; messages out of order, with another proposal's ticket, without
arrays. Each block has a seed of its own; a block that is in the result file is not played again, so that a
second command goes on where the first was stopped. A sequence in which something leaves that was not charged,
noised and masked as its own proposal says ends the command with the reason.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from common import RESULTS, show
from provenance import require_commit

sys.path.insert(0, str(Path(__file__).parents[1]))
BLOCK = 250
PATH = RESULTS / "request_sequences.jsonl"


def blocks(seeds: list[int]) -> Iterator[dict[str, object]]:
    from tests.sites.request_sequences import play, started

    torch.set_num_threads(1)
    with started(Path(tempfile.mkdtemp()) / "sites") as site:
        logging.disable(logging.CRITICAL)
        for seed in seeds:
            rng = np.random.default_rng([47, seed])
            site.sent = site.refused = site.kills = 0
            site.kinds.clear()
            for _ in range(BLOCK):
                play(site, rng)
            row = {"seed": seed, "sequences": BLOCK, "sent": site.sent, "refused": site.refused}
            yield row | {"kills": site.kills, "sent_under": sorted(site.kinds)}


def work(seeds: list[int], commit: str) -> int:
    for row in blocks(seeds):
        with PATH.open("a") as file:
            file.write(json.dumps(row | {"commit": commit}) + "\n")
    return len(seeds)


def known() -> list[dict[str, int]]:
    return [json.loads(line) for line in PATH.read_text().splitlines()] if PATH.exists() else []


def main() -> None:
    commit = require_commit()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20_000, help=f"sequences, in blocks of {BLOCK}")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    options = parser.parse_args()
    played = {row["seed"] for row in known()}
    left = [seed for seed in range(-(-options.count // BLOCK)) if seed not in played]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        parts = [left[number :: options.workers] for number in range(options.workers)]
        list(pool.map(work, parts, [commit] * options.workers))
    rows = known()
    total = [sum(row[key] for row in rows) for key in ("sequences", "sent", "refused", "kills")]
    show(
        "Sequences of messages to a site",
        ["sequences", "updates sent", "requests refused", "kills"],
        [[f"{number:,}" for number in total]],
        {"nothing left that was not charged, noised and masked": True},
        PATH,
    )


if __name__ == "__main__":
    main()
