"""The appendices of the theory laboratory, of adapters and of speed, computed from benchmarks/results."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import adapters as adapter_study
from cells import table

from fedfrozen_app.theory.accuracy import AUTO, Verdict, evaluate, scores_of

TABLE_WARMUPS = (0, 5, 15, 40, 80, 150)
LABELS = {  # of theory_controls.json, as the appendix calls them
    ("rate", "constant rate"): "40 x 150",  # three groups share this line
    ("dials", "kernels 0.7 and inputs 0.5"): "40 x 150",
    ("rate", "cosine"): "40 x 150, cosine",
    ("softmax", "constant rate"): "softmax, constant rate",
    ("softmax", "cosine"): "softmax, cosine",
}
MODELS = {"vit_d192": "ViT d192", "minilm": "MiniLM", "dinov2_s": "DINOv2-S", "simple_cnn": "CNN"}
PEAK = 989e12  # operations a second of an H200 in bf16, without sparsity
CENTRAL = ("in turn, step by step", "in turn, recorded", "central", "central, compiled")


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def least(values: Mapping[str, float], shown: str) -> str:
    """A line's cells, the smallest in bold."""
    low = min(values.values())
    return " | ".join(
        f"**{value:{shown}}**" if value == low else f"{value:{shown}}" for value in values.values()
    )


def interval(values: Sequence[float]) -> str:
    mean, low, high = values
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def spread(figure: Mapping[str, Any], scale: float = 1.0, digits: int = 0) -> str:
    """Median and range."""
    middle, low, high = (f"{scale * figure[key]:,.{digits}f}" for key in ("median", "low", "high"))
    return f"{middle} ({low}–{high})"


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


class Theory:
    """`fedfrozen theory study=all`, `study=controls` and benchmarks/warmup.py."""

    def __init__(self, folder: Path) -> None:
        self.all, self.found = read(folder, "theory_all"), read(folder, "theory_controls")
        self.models = {
            name: read(folder, f"warmup_{name}")["cells"] for name in ("digits", "layers", "cifar10")
        }

    @cached_property
    def lines(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for line in self.found["lines"]:
            found.setdefault(LABELS.get((line["group"], line["label"]), line["label"]), line)
        return found

    def final(self, label: str, length: str) -> str:
        return f"{self.lines[label]['final'][length][0]:.3f}"

    def against_never(self, label: str, length: str | None = None) -> str:
        line = self.lines[label]
        return interval(line["best_against_never"] if length is None else line["against_never"][length])

    def calm(self, group: str) -> str:
        (found,) = (row for row in self.found["calm"] if row["group"] == group)
        return interval(found["difference"])

    def regret(self, label: str) -> str:
        return f"{100 * self.lines[label]['auto_regret']:.1f} %"

    def ablation(self, name: str) -> str:
        return f"{self.all['ablation'][name]:.3f}"

    def final_table(self) -> str:
        rows = [
            [
                f"{row['heterogeneity']:g}, {row['local_steps']}",
                least(dict(zip(map(str, TABLE_WARMUPS), row["final"], strict=True)), ".3f"),
            ]
            for row in self.all["table"]
        ]
        return table(["heterogeneity, local steps", " | ".join(map(str, TABLE_WARMUPS))], rows)

    def share_table(self) -> str:
        rows = [[name, least(row, ".3f")] for name, row in self.all["controls"].items()]
        return _wide("setting", list(next(iter(self.all["controls"].values()))), rows)

    def rule_table(self) -> str:
        rows = [
            [
                row["setting"],
                str(row["best_fixed"]),
                str(sorted(row["auto"])[len(row["auto"]) // 2]),
                f"{100 * row['regret']:+.1f} %",
                f"{100 * row['behind_never']:+.1f} %",
            ]
            for row in sorted(self.all["auto"], key=lambda row: row["setting"])
        ]
        return table(["setting", "best fixed", "auto, median", "regret", "against never freezing"], rows)

    def control_table(self) -> str:
        rows = [
            [
                label,
                least({key: value[0] for key, value in line["final"].items()}, ".3f"),
                f"{100 * line['still_falls']:+.1f} %",
            ]
            for label, line in self.lines.items()
        ]
        lengths = list(next(iter(self.lines.values()))["final"])
        return _wide("setting", lengths, rows, "still falls")

    def difference_table(self) -> str:
        rows = [
            [label, line["best"], self.against_never(label)]
            + [interval(line["against_never"][length]) for length in ("80 %", "last")]
            for label, line in self.lines.items()
        ]
        return table(["setting", "best", "best less never", "80 % less never", "last less never"], rows)

    def control_rule_table(self) -> str:
        rows = [
            [
                label,
                line["best"],
                f"{line['auto_median']:.0%}".replace("%", " %"),
                f"{line['auto_never_froze']:.0%}".replace("%", " %"),
                f"{100 * line['auto_regret']:+.1f} %",
                f"{100 * line['auto_behind_never']:+.1f} %",
            ]
            for label, line in self.lines.items()
        ]
        head = [
            "setting",
            "best fixed",
            "auto, median",
            "auto never froze",
            "regret",
            "against never freezing",
        ]
        return table(head, rows)

    def model_table(self) -> str:
        rows, labels = [], []
        for cells in self.models.values():
            for setting, by_warmup in scores_of(cells).items():
                labels = list(by_warmup)
                means = {label: 100 * statistics.fmean(by_warmup[label].values()) for label in labels}
                best = max(value for label, value in means.items() if label != AUTO)
                rows.append([setting, *(_score(by_warmup[label], means[label], best) for label in labels)])
        return table(["setting", *labels], rows)

    def verdicts(self) -> Iterable[Verdict]:
        return (verdict for cells in self.models.values() for verdict in evaluate(cells))

    def verdict_table(self) -> str:
        rows = [
            [each.setting, each.best, f"{each.regret:+.2f}", f"{each.behind_never:+.2f}"]
            for each in self.verdicts()
        ]
        return table(["setting", "best fixed", "regret of auto, points", "behind never freezing"], rows)


def _wide(first: str, lengths: Sequence[str], rows: Sequence[Sequence[str]], *more: str) -> str:
    """A table whose second cell holds one cell per length."""
    head = "| " + " | ".join([first, *lengths, *more]) + " |"
    count = 1 + len(lengths) + len(more)
    return "\n".join([head, "|" + "---|" * count, *("| " + " | ".join(row) + " |" for row in rows)])


def _score(seeds: Mapping[int, float], mean: float, best: float) -> str:
    shown = f"**{mean:.1f}**" if mean == best else f"{mean:.1f}"
    return f"{shown} ± {100 * statistics.stdev(seeds.values()):.1f}"


class Adapters:
    """benchmarks/adapters.py and benchmarks/adapter_speed.py."""

    def __init__(self, folder: Path) -> None:
        self.lines, self.speed = read(folder, "adapters")["lines"], read(folder, "adapter_speed")["found"]

    def line(self, study: str, title: str, epsilon: float | None = None) -> dict[str, Any]:
        own = [x for x in self.lines if (x["study"], x["title"], x["epsilon"]) == (study, title, epsilon)]
        (found,) = own
        return dict(found)

    def gap(self, study: str, title: str, base: str = "fedavg", epsilon: float | None = None) -> str:
        return adapter_study.gap_text(self.line(study, title, epsilon), base)

    def score(self, study: str, title: str, epsilon: float | None = None) -> str:
        return f"{self.line(study, title, epsilon)['score']:.3f}"

    def fewer(self, study: str, title: str) -> str:
        """Times fewer bytes up than FedAvg."""
        return f"{self.line(study, 'fedavg')['bytes_up'] / self.line(study, title)['bytes_up']:.0f}"

    def tables(self) -> str:
        return adapter_study.report(self.lines)

    def speed_table(self) -> str:
        names = {
            "clients stacked": "stacked",
            "clients stacked, compiled": "stacked, `runtime.compile=true`",
            "clients in turn": "one after another",
            "central, peft": "central, peft",
        }
        rows = [
            [shown]
            + [
                cell
                for model in self.speed.values()
                for cell in (spread(summary(model[name]["rates"])), f"{model[name]['peak_bytes'] / 1e9:.1f}")
            ]
            for name, shown in names.items()
        ]
        return table(
            ["", "ViT-B, 32 pictures a client", "GB", "BERT-base, 32 texts of 128 tokens", "GB"], rows
        )

    def share_of_central(self) -> str:
        shares = [
            statistics.median(model["clients stacked"]["rates"])
            / statistics.median(model["central, peft"]["rates"])
            for model in self.speed.values()
        ]
        return " and ".join(f"{share:.2f}" for share in shares)


class Speed:
    """The GPU's measurements: every repeat is in the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _figures(self) -> list[dict[str, Any]]:
        return list(read(self.folder, "cohort")["figures"])

    def _operations(self) -> dict[str, float]:
        """Of an image's products, by model."""
        found = (figure for figure in self._figures() if "operations_of_an_image" in figure)
        return {figure["model"]: figure["operations_of_an_image"] for figure in found}

    @staticmethod
    def _case(figure: Mapping[str, Any]) -> list[str]:
        model = MODELS[figure.get("model", "vit_d192")]
        return [model, f"{figure['clients']} x {figure['batch']}", figure["split"]]

    def rounds_table(self) -> str:
        operations, rows = self._operations(), []
        for figure in self._figures():
            rate, over = figure["images_per_second"]["cohort"]["median"], figure["cohort_over"]
            share = rate * operations[figure.get("model", "vit_d192")] / PEAK
            ratios = [spread(over[name], digits=2) if name in over else "–" for name in CENTRAL]
            rows.append([*self._case(figure), f"{rate:,.0f}", f"{100 * share:.0f} %", *ratios])
        head = ["model", "clients x batch", "split", "cohort, images/s", "of the peak"]
        return table([*head, *(f"over {name}" for name in CENTRAL)], rows)

    def phase_table(self) -> str:
        phases = ("data", "step", "aggregate", "evaluate")
        rows = [
            [
                *self._case(figure),
                *(f"{1000 * figure['cohort_phases_seconds'][phase]['median']:.0f}" for phase in phases),
            ]
            for figure in self._figures()
        ]
        return table(["model", "clients x batch", "split", *(f"{phase}, ms" for phase in phases)], rows)

    def first_round_table(self) -> str:
        names = ("first_round_two_models", "first_round_dinov2", "first_round_true")
        lines = {key: runs for name in names for key, runs in read(self.folder, name)["lines"].items()}
        rows = []
        for model in ("vit_d192", "minilm", "dinov2_s"):
            for cache in ("cold", "warm"):
                cells = [
                    f"{statistics.median(run[f'round_{number}'] for run in lines[key]):.1f}"
                    if key in lines
                    else "–"
                    for option in ("auto", "false", "true")
                    for key in (f"{model}, compile={option}, {cache}",)
                    for number in (1, 20)
                ]
                rows.append([MODELS[model], cache, *cells])
        head = [f"round {number}, `{option}`" for option in ("auto", "false", "true") for number in (1, 20)]
        return table(["model", "cache", *head], rows)

    def step_table(self) -> str:
        kinds: dict[str, None] = {}
        lines = []
        for name, file in (
            ("vit_d192, compile=false", "step_profile"),
            ("minilm, compile=false", "step_profile_slopes"),
            ("dinov2_s, compile=false", "step_profile_slopes"),
            ("simple_cnn, compile=false", "step_profile_conv"),
            ("simple_cnn, compile=true", "step_profile_cnn"),
        ):
            line = read(self.folder, file)["lines"][name]
            kinds |= dict.fromkeys(line["kinds_ms_a_step"])
            lines.append(
                (MODELS[name.partition(",")[0]] + (", compiled" if name.endswith("true") else ""), line)
            )
        rows = [
            [title, f"{line['round_ms_a_step']:.1f}", f"{line['kernels_ms_a_step']:.1f}"]
            + [
                f"{line['kinds_ms_a_step'][kind]:.1f}" if kind in line["kinds_ms_a_step"] else "–"
                for kind in kinds
            ]
            for title, line in lines
        ]
        return table(["model", "step, ms", "kernels", *kinds], rows)

    def private_table(self) -> str:
        before, runners = read(self.folder, "private_before"), read(self.folder, "private_clients")
        rows = [
            [
                what,
                "commit `4a3b967`",
                spread(line["before"], digits=2),
                spread(line["together"], digits=2),
                spread(before["times_quicker"][what], digits=1),
            ]
            for what, line in before["seconds"].items()
        ]
        rows += [
            [
                what,
                "today's two runners",
                spread(summary(line["sequential"]), digits=2),
                spread(summary(line["cohort"]), digits=2),
                spread(runners["times_quicker"][what], digits=1),
            ]
            for what, line in runners["seconds"].items()
        ]
        head = ["what trains", "compared with", "one after another, s", "together, s", "times as quick"]
        return table(head, rows)

    def pfl_table(self) -> str:
        found = [read(self.folder, name)["figures"] for name in ("pfl_cifar", "pfl_cifar_tf32")]
        rows = [
            [shown]
            + [
                cell
                for one in found
                for cell in (
                    spread(one["milliseconds_a_round"][name], digits=1),
                    f"{one['accuracy'][name]:.3f}",
                )
            ]
            for name, shown in (("plain loop", "plain loop"), ("pfl", "pfl 0.6.0"), ("ours", "cohort runner"))
        ]
        ratios = [cell for one in found for cell in (spread(one["times_faster_than_pfl"], digits=1), "")]
        rows.append(["pfl over ours", *ratios])
        return table(["", "float32, ms a round", "accuracy", "TF32, ms a round", "accuracy"], rows)

    def sweep_table(self) -> str:
        found = read(self.folder, "sweep_time")
        whole = found["sweep_seconds"]
        lines = {
            "the sweep in one process": whole,
            "its runs' training, added up": sum(found["training_seconds"]),
        }
        for option, seconds in found["reckoned_seconds"].items():
            each = found["alone_seconds"][option][0]
            lines[f"one by one, `runtime.compile={option}`: {found['runs']} times {each:.1f} s"] = seconds
        rows = [[name, f"{seconds:,.0f}", f"{seconds / whole:.2f}"] for name, seconds in lines.items()]
        return table(["", "seconds", "times the sweep"], rows)

    def flower_table(self) -> str:
        found = read(self.folder, "cohort_flower")
        rows = [
            [name, spread(figure), f"{found['times_flower'][name]:.1f}"]
            for name, figure in found["images_per_second"].items()
        ]
        return table(["", "images/s", "times Flower's simulation"], rows)

    def memory_table(self) -> str:
        found = read(self.folder, "gpu_memory_long")["figures"]
        rows = [
            [
                f"{count} clients, {place}",
                *(f"{found[f'{count}_clients_{place}_mb'][key]:,.0f}" for key in ends),
            ]
            for count in (100, 1000)
            for place in ("device", "host")
            for ends in (("early", "late"),)
        ]
        return table(["", "after round 5, MB", "after round 100, MB"], rows)
