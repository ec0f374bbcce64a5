"""What the pages state of benchmarks/codecs.py, computed from its rows."""

import statistics
from pathlib import Path
from typing import Any

from cells import paired, read, table

NAME = "codecs.jsonl"
STUDIES = {"cifar10": "CIFAR-10, ViT", "mtsamples": "MTSamples, MiniLM with LoRA"}
STRATEGIES = {"fedavg": "FedAvg", "fedfrozen": "FedFrozen"}
WAYS = {
    "float32": "32 bits",
    "float16": "16 bits (`float16`)",
    "bfloat16": "16 bits (`bfloat16`)",
    "int8": "8 bits (`int8`)",
    "int4": "4 bits (`int4`)",
    "int4-rotated": "4 bits, rotated",
    "top10": "largest 10 % (`topk`)",
    "top1": "largest 1 % (`topk`)",
    "random10": "random 10 % (`randomk`)",
    "alone32": "32 bits, one client after another",
    "masked32": "masked, 32 bits",
    "masked16": "masked, 16 bits",
    "masked12": "masked, 12 bits",
    "masked8": "masked, 8 bits",
}
LINK = 10e6  # bits a second
UNMASKED = ("float32", "float16", "int8", "int4", "int4-rotated", "top10", "top1")
HEAD = ["data", "method", "upload", "seeds", "score", "less 32 bits, paired", "bytes up, of 32 bits"]


class Codecs:
    def __init__(self, folder: Path) -> None:
        self.rows = read(folder / NAME)
        self.by: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
        for row in self.rows:
            if row["kind"] == "run" and row["cell"]["study"] in STUDIES:
                cell = row["cell"]
                self.by.setdefault((cell["study"], cell["strategy"], cell["way"]), {})[cell["seed"]] = row

    @property
    def rounds(self) -> int:
        (rounds,) = {row["rounds"] for own in self.by.values() for row in own.values()}
        return rounds

    def base(self, study: str, strategy: str, way: str) -> dict[int, dict[str, Any]]:
        """What a way is compared with: under masks clients train one after another."""
        plain = "alone32" if way.startswith(("masked", "alone")) else "float32"
        return self.by.get((study, strategy, plain), {})

    def less(self, study: str, strategy: str, way: str) -> Any:
        """Points of the score over 32 bits, paired by seed."""
        own, base = self.by[study, strategy, way], self.base(study, strategy, way)
        ours, theirs = ({seed: 100 * row["score"] for seed, row in one.items()} for one in (own, base))
        return paired(ours, theirs)

    def table(self) -> str:
        lines = []
        for study, strategy, way in ((s, t, w) for s in STUDIES for t in STRATEGIES for w in WAYS):
            own, base = self.by.get((study, strategy, way), {}), self.base(study, strategy, way)
            if own:
                gap = None if way in ("float32", "alone32") else self.less(study, strategy, way)
                points = "" if gap is None or gap.seeds < 2 else f"{gap.mean:+.2f} ± {gap.half:.2f}"
                shares = [
                    own[seed]["array_bytes_up"] / base[seed]["array_bytes_up"] for seed in own if seed in base
                ]
                lines.append(
                    [
                        STUDIES[study],
                        STRATEGIES[strategy],
                        WAYS[way],
                        str(len(own)),
                        f"{100 * statistics.fmean(row['score'] for row in own.values()):.1f}",
                        points,
                        f"{statistics.fmean(shares):.3f}" if shares else "",
                    ]
                )
        return table(HEAD, lines)

    def lost(self, way: str, study: str) -> str:
        """The mean differences of a way on one data set, one for each method."""
        gaps = (self.less(study, strategy, way) for strategy in STRATEGIES)
        return " and ".join(f"{gap.mean:+.1f}" for gap in gaps)

    def seeds(self, study: str) -> int:
        """That every way of uploads without masks has."""
        return min(len(own) for (name, _, way), own in self.by.items() if name == study and way in UNMASKED)

    @property
    def summed(self) -> bool:
        return any(row["kind"] == "sum" for row in self.rows)

    def sums(self) -> str:
        """Masked sums by cohort and bits, medians over the repeats."""
        found: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for row in self.rows:
            if row["kind"] == "sum":
                found.setdefault((row["cohort"], row["bits"]), []).append(row)
        lines = []
        for (cohort, bits), own in sorted(found.items(), key=lambda one: (one[0][0], -one[0][1])):
            client, server = (
                statistics.median(row[f"{who}_seconds"] for row in own) for who in ("client", "server")
            )
            upload = statistics.median(upload_ratio(row) for row in own)
            exact = "yes" if all(row["exact"] for row in own) else "NO"
            share, repeats = f"{own[0]['of_float32']:.3f}", str(len(own))
            lines.append(
                [
                    str(cohort),
                    str(bits),
                    repeats,
                    exact,
                    share,
                    f"{client:.2f}",
                    f"{server:.1f}",
                    f"{upload:.2f}",
                ]
            )
        head = ["clients", "bits", "sums", "exact", "bytes, of float32", "seconds of a client"]
        return table([*head, "of the server", "an upload, of plain float32"], lines)

    @property
    def masked_seeds(self) -> int:
        return min(len(own) for (_, _, way), own in self.by.items() if way.startswith("masked"))

    @property
    def masked(self) -> bool:
        return any(way.startswith("masked") for _, _, way in self.by)


def upload_ratio(row: dict[str, Any]) -> float:
    """Seconds of masking and sending an update over a link, over those of sending plain float32."""
    seconds = 8 * row["bytes"] / LINK
    return (row["client_seconds"] + seconds) / (seconds / row["of_float32"])
