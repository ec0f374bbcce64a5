"""The pictures of the results pages: what each shows, computed from rows, and how it is drawn.

`recompute.py` draws a picture when what it shows has changed. Axes are linear, differences are paired by
seed with 95 % intervals, and a cell that was not run is marked.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import freezing
import methods as methods_study
import pfeddc_report
import public_numbers
import regimes
import safl_report
from cells import Difference, paired
from evidence import Evidence, MapStudy

Data = Any  # what JSON holds
BLUE, GREEN, ORANGE, PURPLE, GREY = "#0072B2", "#009E73", "#D55E00", "#6a4c93", "#8c8c8c"


@dataclass(frozen=True)
class Picture:
    data: Callable[[Evidence], Data]
    draw: Callable[[Data, Path], None]


def point(difference: Difference | None) -> list[float] | None:
    """Mean and half of the interval; None where nothing was run."""
    if difference is None or math.isinf(difference.half):
        return None
    return [round(difference.mean, 2), round(difference.half, 2)]


def new_figure(rows: int, columns: int, size: tuple[float, float], **more: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **more)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=120)
    plt.close(figure)


def dots(
    panel: Any, lines: Sequence[tuple[str, str, Sequence[list[float] | None]]], labels: Sequence[str]
) -> None:
    """Paired differences: a row for each label, a colour for each line (name, colour, points)."""
    for number, (name, colour, values) in enumerate(lines):
        aside = 0.22 * (number - (len(lines) - 1) / 2)
        there = [(place + aside, value) for place, value in enumerate(values) if value is not None]
        panel.errorbar(
            [value[0] for _, value in there],
            [place for place, _ in there],
            xerr=[value[1] for _, value in there],
            **{"fmt": "o", "ms": 4, "lw": 1, "color": colour, "label": name},
        )
        for place, value in enumerate(values):
            if value is None:
                panel.text(0, place + aside, "not run", color=colour, fontsize=6, va="center", ha="center")
    panel.axvline(0, color="0.5", lw=0.8)
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.set_ylim(len(labels) - 0.4, -0.6)
    panel.grid(axis="y", lw=0.3)


# Freezing by warm-up length, at each rate schedule -------------------------------------------------------

CALM = (("constant rate", "constant", False, BLUE), ("cosine", "cosine", False, GREEN))
CALM += (("constant rate, server average", "constant", True, ORANGE),)
LENGTHS = (*freezing.SHOWN, freezing.NEVER)


def by_schedule(evidence: Evidence) -> Data:
    rows, found = evidence.tuning.rows, {}
    for title, schedule, average, _ in CALM:
        never = freezing.Arm(freezing.FEW, schedule, "1", average=average)
        arms = [replace(never, freeze=length) for length in LENGTHS]
        levels = [paired(scores := rows.scores(arm), dict.fromkeys(scores, 0.0)) for arm in arms]
        found[title] = {
            "level": [point(level) for level in levels],
            "paired": [point(rows.difference(arm, never)) for arm in arms[:-1]] + [[0.0, 0.0]],
        }
    return found


def draw_by_schedule(data: Data, path: Path) -> None:
    figure, ((left, right),) = new_figure(1, 2, (10, 4.2))
    colours = {title: colour for title, _, _, colour in CALM}
    for panel, key in ((left, "level"), (right, "paired")):
        for title, found in data.items():
            means = [value[0] for value in found[key]]
            low, high = (
                [m + sign * value[1] for m, value in zip(means, found[key], strict=True)] for sign in (-1, 1)
            )
            panel.plot(LENGTHS, means, "o-", ms=4, lw=1.7, color=colours[title], label=title)
            panel.fill_between(LENGTHS, low, high, color=colours[title], alpha=0.18, lw=0)
        panel.grid(axis="y", color="0.92")
        panel.set_xlabel("rounds before the kernel is frozen")
    right.axhline(0, color="0.3", ls=":", lw=1.2)
    left.set_title("Test accuracy, %", loc="left")
    right.set_title("Points above never freezing, paired", loc="left")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


# The map -------------------------------------------------------------------------------------------------

EARLY = {"10 %": ("frozen after 10 %", "#7fb2d9")}
OTHERS = {
    "50 %": ("frozen after 50 %", "#1f4e79"),
    regimes.LATE: ("frozen only while it is scored", "#6b8e4e"),
    regimes.COSINE: ("never frozen, decaying rate", ORANGE),
}


def map_of(study: MapStudy) -> Data:
    settings = [s for s in study.study.settings if s.name in study.names]
    settings.sort(
        key=lambda s: (-s.participation, s.optimizer, s.rate, -regimes.skew_of(study.rows, s), -s.local_steps)
    )
    methods = (*EARLY, *OTHERS)
    return {s.name: {method: point(study.gain(s.name, method)) for method in methods} for s in settings}


def draw_map(data: Data, path: Path) -> None:
    widths = {"width_ratios": [1, 2]}
    size = (11, 1.6 + 0.36 * len(data))
    figure, ((left, right),) = new_figure(1, 2, size, sharey=True, gridspec_kw=widths)
    for panel, shown in ((left, EARLY), (right, OTHERS)):
        lines = [
            (title, colour, [own[method] for own in data.values()])
            for method, (title, colour) in shown.items()
        ]
        dots(panel, lines, list(data))
        panel.set_xlabel("points above never freezing")
        panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False, fontsize=8)
    save(figure, path)


# Freezing under tuning -----------------------------------------------------------------------------------


def tuning_of(evidence: Evidence) -> Data:
    rows, found = evidence.tuning.rows, {}
    for arm in freezing.settings():
        own = {
            f"frozen after {f}": point(rows.difference(replace(arm, freeze=f), arm)) for f in freezing.SHOWN
        }
        own["server average, never frozen"] = point(rows.difference(replace(arm, average=True), arm))
        found.setdefault(arm.experiment, {})[f"{arm.title} ({rows.mean(arm)} %)"] = own
    return found


def draw_tuning(data: Data, path: Path) -> None:
    figure, (panels,) = new_figure(1, 2, (11, 4.8))
    colours = ("#7fb2d9", "#1f4e79", "#6b8e4e", ORANGE)
    for panel, (experiment, cells) in zip(panels, data.items(), strict=True):
        names = list(next(iter(cells.values())))
        lines = [
            (name, colour, [own[name] for own in cells.values()])
            for name, colour in zip(names, colours, strict=True)
        ]
        panel.axvspan(-freezing.TIE, freezing.TIE, color="0.93", zorder=0)
        dots(panel, lines, list(cells))
        panel.set_title(experiment)
        panel.set_xlabel("points above never at the same schedule and rate")
    panels[0].set_ylabel("schedule, rate (never, %)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    save(figure, path)


# Public numbers ------------------------------------------------------------------------------------------


def public_of(evidence: Evidence) -> Data:
    lines = {"niid-fedavg": "FedAvg, JPEG, our partition", "niid-scaffold": "SCAFFOLD, JPEG, our partition"}
    lines |= {name: f"{line.setting}, exact" for name, line in public_numbers.EXACT.items() if not line.jpeg}
    found = {}
    for name, title in lines.items():
        line = public_numbers.EVERY[name]
        own = [row for row in evidence.public.all if row["line"] == name and "failed" not in row]
        found[title] = {
            "published": list(line.published),
            "spread": line.spread,
            "best": [round(100 * row["best"], 1) for row in own],
            "last": [round(100 * row["final"], 1) for row in own],
        }
    return found


def draw_public(data: Data, path: Path) -> None:
    figure, ((panel,),) = new_figure(1, 1, (8.5, 4.2))
    for place, own in enumerate(data.values()):
        flower, *others = own["published"]
        panel.errorbar(flower, place - 0.15, xerr=2 * (own["spread"] or 0), fmt="s", color=BLUE, ms=6, lw=1.2)
        panel.plot(others, [place - 0.15] * len(others), "D", color=PURPLE, ms=5)
        panel.plot(own["best"], [place + 0.15] * len(own["best"]), "o", color=ORANGE, ms=6)
        panel.plot(own["last"], [place + 0.15] * len(own["last"]), "|", color=ORANGE, ms=12, mew=2)
        if not own["best"]:
            panel.text(flower, place + 0.15, "not run", color=ORANGE, fontsize=8, va="center", ha="center")
    panel.set_yticks(range(len(data)), list(data), fontsize=9)
    panel.set_ylim(len(data) - 0.4, -0.6)
    panel.grid(axis="y", lw=0.3)
    panel.set_xlabel("test accuracy on CIFAR-10, %")
    titles = (
        "Flower, best round (2 spreads where stated)",
        "NIID-Bench",
        "ours, best round",
        "ours, last round",
    )
    for title, mark, colour in zip(titles, "sDo|", (BLUE, PURPLE, ORANGE, ORANGE), strict=True):
        panel.plot([], [], mark, color=colour, label=title)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    save(figure, path)


# SAFL ----------------------------------------------------------------------------------------------------

SAFL_PAIRS = (
    ("MTSamples", "mtsamples", None, ("random", "gradient", "once", "fixed", "all", "fedavg", "head")),
    ("MACCROBAT", "maccrobat", None, ("random", "fixed", "fedavg")),
    ("MTSamples, epsilon 8", "mtsamples", 8, ("random", "fedavg", "head")),
    ("MTSamples, epsilon 2", "mtsamples", 2, ("random", "fedavg", "head")),
)


def safl_of(evidence: Evidence) -> Data:
    found = []
    for title, dataset, epsilon, others in SAFL_PAIRS:
        for other in others:
            pair = evidence.safl.pair(other, dataset, epsilon)
            values = [round(100 * pair[key], 1) for key in ("mean", "low", "high")]
            found.append([title, safl_report.NAMES[other], *values])
    return found


def draw_safl(data: Data, path: Path) -> None:
    figure, ((panel,),) = new_figure(1, 1, (8.5, 5.4))
    colours = dict(zip(dict.fromkeys(line[0] for line in data), (BLUE, GREEN, ORANGE, PURPLE), strict=True))
    for place, (title, _, mean, low, high) in enumerate(data):
        panel.errorbar(
            mean, place, xerr=[[mean - low], [high - mean]], fmt="o", ms=5, lw=1.2, color=colours[title]
        )
    for title, colour in colours.items():
        panel.plot([], [], "o", color=colour, label=title)
    panel.axvline(0, color="0.5", lw=0.8)
    panel.set_yticks(range(len(data)), [line[1] for line in data], fontsize=9)
    panel.invert_yaxis()
    panel.grid(axis="y", lw=0.3)
    panel.set_xlabel("SAFL less the other, points of F1 (95 % over notes and seeds, paired)")
    panel.legend(frameon=False, fontsize=9, loc="upper left")
    save(figure, path)


def safl_lines(evidence: Evidence) -> Data:
    return evidence.safl.found["safl"]


def budgets_of(evidence: Evidence) -> Data:
    """SAFL's lines, with what other studies reach on the same notes and budgets."""
    return {"safl": safl_lines(evidence), "others": evidence.safl.other_budgets()}


def draw_safl_bytes(data: Data, path: Path) -> None:
    import plots

    save(plots.safl_bytes(data), path)


def draw_safl_epsilon(data: Data, path: Path) -> None:
    import plots

    save(plots.safl_epsilon(data["safl"], data["others"]), path)


# pFedDC --------------------------------------------------------------------------------------------------


def pfeddc_of(evidence: Evidence) -> Data:
    own = evidence.pfeddc
    found: dict[str, dict[str, Any]] = {"cross less sum": {}, "less local prompts": {}}
    for tower in ("text", "vision", "both"):
        found["cross less sum"][f"prompts on {tower}"] = [
            point(own.less(f"{tower}, cross", f"{tower}, sum", clients)) for clients in (4, 12)
        ]
    for method, title in (
        ("both, cross", "pFedDC"),
        ("both, sum", "sum, both towers"),
        ("text, global", "PromptFL"),
    ):
        found["less local prompts"][title] = [
            point(own.less(method, "local only", clients)) for clients in (4, 12)
        ]
    return found


def draw_pfeddc(data: Data, path: Path) -> None:
    figure, (panels,) = new_figure(1, 2, (10.5, 3.4))
    for panel, (title, own) in zip(panels, data.items(), strict=True):
        lines = [
            (name, colour, [values[number] for values in own.values()])
            for number, (name, colour) in enumerate((("4 clients", BLUE), ("12 clients", ORANGE)))
        ]
        dots(panel, lines, list(own))
        panel.set_title(title)
        panel.set_xlabel("points, mean over clients")
    panels[0].legend(frameon=False, fontsize=9)
    save(figure, path)


def fairness_of(name: str) -> Callable[[Evidence], Data]:
    def data(evidence: Evidence) -> Data:
        return pfeddc_report.fairness_lines(evidence.pfeddc.found[name]["cells"])

    return data


def draw_fairness(data: Data, path: Path) -> None:
    from fedfrozen_app.report.personal import fairness_picture

    fairness_picture(data, path)


# Methods -------------------------------------------------------------------------------------------------


def methods_of(evidence: Evidence) -> Data:
    own = evidence.methods
    found: dict[str, Any] = {}
    for personal in (False, True):
        base = methods_study.LOCAL if personal else methods_study.FEDAVG
        names = [n for n in own.study.methods if methods_study.METHODS[n].personal == personal and n != base]
        found[base] = {
            name: {
                f"{model}, Dirichlet {alpha:g}": point(own.gain(name, model, alpha))
                for model in own.study.models
                for alpha in own.study.alphas
            }
            for name in names
        }
    return found


def draw_methods(data: Data, path: Path) -> None:
    heights = {"height_ratios": [len(own) for own in data.values()]}
    figure, panels = new_figure(2, 1, (8.5, 10), gridspec_kw=heights)
    titles = {
        methods_study.FEDAVG: "The shared model, points above FedAvg",
        methods_study.LOCAL: "Every client's own model, points above training alone",
    }
    for (panel,), (base, methods) in zip(panels, data.items(), strict=True):
        places = list(next(iter(methods.values())))
        lines = [
            (place, colour, [own[place] for own in methods.values()])
            for place, colour in zip(places, (BLUE, "#7fb2d9", ORANGE, "#e0a458"), strict=True)
        ]
        dots(panel, lines, list(methods))
        panel.set_title(titles[base], loc="left")
    panels[0][0].legend(frameon=False, fontsize=8)
    save(figure, path)


PICTURES: Mapping[str, Picture] = {
    "freezing-by-schedule.png": Picture(by_schedule, draw_by_schedule),
    "regimes-digits_long.png": Picture(lambda evidence: map_of(evidence.long), draw_map),
    "regimes-digits.png": Picture(lambda evidence: map_of(evidence.short), draw_map),
    "regimes-cifar10.png": Picture(lambda evidence: map_of(evidence.cifar), draw_map),
    "freezing-under-tuning.png": Picture(tuning_of, draw_tuning),
    "public.png": Picture(public_of, draw_public),
    "safl.png": Picture(safl_of, draw_safl),
    "safl_bytes.png": Picture(safl_lines, draw_safl_bytes),
    "safl_epsilon.png": Picture(budgets_of, draw_safl_epsilon),
    "pfeddc.png": Picture(pfeddc_of, draw_pfeddc),
    "pfeddc/fairness.png": Picture(fairness_of("pfeddc"), draw_fairness),
    "pfeddc/fairness-pfeddc_fused.png": Picture(fairness_of("pfeddc_fused"), draw_fairness),
    "methods-cifar10.png": Picture(methods_of, draw_methods),
}
