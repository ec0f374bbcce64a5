"""Pictures of the GPU benchmarks from their result files, in docs/figures.

    python benchmarks/plots.py

draws cohort.png, cohort_flower.png and pfl_cifar.png, as far as there are results. recompute.py draws the
pictures of the results pages.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from common import RESULTS
from safl_report import NAMES, SETS, in_order, top_k

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
MARKS = {"fedavg": "#7fb2d9", "all": "#8c8c8c", "safl": "#1f4e79", "random": "#e0a458", "fixed": "#b5651d"}
MARKS |= {"head": "#6b8e4e", "once": "#c77d9b", "gradient": "#6a4c93"}
LEVELS = {
    "central": "-",
    "majority": "--",
    "untrained": ":",
    "tfidf": "-.",
    "tfidf_whole": "-.",
}  # drawn as lines across
COLORS = ["#1f4e79", "#7fb2d9", "#c9d7e3", "#e0a458", "#b5651d"]


def main() -> None:
    pictures: dict[str, tuple[str, Callable[[dict[str, Any]], plt.Figure | None]]] = {
        "cohort": ("cohort", cohort),
        "cohort_flower": ("cohort_flower", cohort_flower),
        "pfl_cifar": ("pfl_cifar", pfl_cifar),
    }
    for name, (benchmark, draw) in pictures.items():
        path = RESULTS / f"{benchmark}.json"
        figure = draw(json.loads(path.read_text())) if path.exists() else None
        if figure is None:
            print(f"No result of {benchmark} for {name}.png")
            continue
        figure.savefig(FIGURES / f"{name}.png", dpi=130)
        plt.close(figure)
        print(f"Written to docs/figures/{name}.png")


def cohort(result: dict[str, Any]) -> plt.Figure:
    """Images a second, a group of bars a set-up; the whisker is the range over repeats."""
    cases = result["figures"]
    names = list(cases[0]["images_per_second"])  # of which a case may lack some
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for number, name in enumerate(names):
        found = {
            group + (number - (len(names) - 1) / 2) * 0.16: case["images_per_second"][name]
            for group, case in enumerate(cases)
            if name in case["images_per_second"]
        }
        _bars(axes, list(found), list(found.values()), 0.15, COLORS[number], name)
    models = {"vit_d192": "ViT d192", "dinov2_s": "DINOv2-S"}
    titles = [
        f"{models[case.get('model', 'vit_d192')]}\n{case['clients']} x {case['batch']}, {case['split']}"
        for case in cases
    ]
    axes.set_xticks(range(len(cases)), titles)
    axes.set_yscale("log")
    axes.set_ylabel("useful images a second (log)")
    axes.set_title(f"Whole rounds on CIFAR-10, {result.get('gpu', 'no GPU')}")
    axes.legend(ncols=3, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def cohort_flower(result: dict[str, Any]) -> plt.Figure:
    """Images a second of our runners and of Flower's simulation of the same app."""
    found = result["images_per_second"]
    texts = {name: f"{spread['median']:,.0f}" for name, spread in found.items()}
    figure, axes = _across(found, "useful images a second", texts)
    setting = f"{result['setting']['clients']} x {result['setting']['batch']}, equal"
    axes.set_title(f"Beside Flower's Ray simulation, {setting}, {result.get('gpu', 'no GPU')}")
    return figure


def pfl_cifar(result: dict[str, Any]) -> plt.Figure:
    """Milliseconds a round of each, and the accuracy it reached."""
    found, accuracy = result["figures"]["milliseconds_a_round"], result["figures"]["accuracy"]
    texts = {n: f"{s['median']:.0f} ms, accuracy {accuracy[n]:.3f}" for n, s in found.items()}
    figure, axes = _across(found, "milliseconds a round", texts)
    axes.set_title(f"pfl-research's CIFAR-10 benchmark, {result.get('gpu', 'no GPU')}")
    return figure


def _across(
    found: dict[str, dict[str, float]], label: str, texts: dict[str, str]
) -> tuple[plt.Figure, plt.Axes]:
    """A bar from the left for each, with the range over repeats and its text behind it; ours is darker."""
    figure, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
    for place, (name, spread) in enumerate(found.items()):
        low, high = spread["median"] - spread["low"], spread["high"] - spread["median"]
        color = COLORS[0 if name in ("ours", "cohort") else 1]
        axes.barh(place, spread["median"], xerr=[[low], [high]], color=color)
        axes.text(spread["high"], place, "  " + texts[name], va="center")
    axes.set_yticks(range(len(found)), list(found))
    axes.set_xlim(right=1.45 * max(spread["high"] for spread in found.values()))
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def safl_bytes(result: dict[str, Any]) -> plt.Figure | None:
    """F1 against what all clients sent, a panel a data set; central training and the floors are lines."""
    plain = [line for line in result["lines"] if line["epsilon"] is None and is_first_k(line, result)]
    shown = [name for name in SETS if any(line["dataset"] == name for line in plain)]
    if not shown:
        return None
    figure, grid = plt.subplots(
        1, len(shown), figsize=(5.5 * len(shown), 4), layout="constrained", squeeze=False
    )
    for axes, dataset in zip(grid[0], shown, strict=True):
        own = in_order([line for line in plain if line["dataset"] == dataset])
        sent = {line["method"]: round(line["bytes_up"] / 1e6, 1) for line in own if line["method"] in MARKS}
        for line in own:
            if line["method"] in LEVELS:
                _level(axes, line)
                continue
            # Methods with the same K send the same: a little aside, so that whiskers can be told apart.
            megabytes = sent[line["method"]]
            equal = [method for method, count in sent.items() if count == megabytes]
            aside = 1.06 ** (equal.index(line["method"]) - (len(equal) - 1) / 2)
            _point(axes, aside * megabytes, line)
        axes.set_xscale("log")
        axes.margins(x=0.25)
        ticks = sorted(set(sent.values()))
        axes.set_xticks(ticks, [f"{count:,.0f}" for count in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("MB up, all clients and rounds (log)")
        axes.set_title(f"{SETS[dataset]}, {own[0]['seeds']} seeds")
    grid[0][0].set_ylabel("F1, points")
    grid[0][0].legend(frameon=False, loc="center right")
    return figure


def is_first_k(line: dict[str, Any], result: dict[str, Any]) -> bool:
    """All methods are there for the first K alone."""
    return top_k(line) == top_k(result["lines"][0])


def safl_epsilon(result: dict[str, Any], others: list[dict[str, Any]] = []) -> plt.Figure | None:  # noqa: B006
    """F1 against the budget; a hollow mark did not learn. `others` are other studies of the same notes."""
    lines = [line for line in result["lines"] if line["dataset"] == "mtsamples" and is_first_k(line, result)]
    budgets = sorted({line["epsilon"] for line in lines if line["epsilon"] is not None})
    if not budgets:
        return None
    places = {epsilon: number for number, epsilon in enumerate([*budgets, None])}
    private = {line["method"] for line in lines if line["epsilon"] is not None}
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    methods = [name for name in NAMES if name in private and name not in LEVELS]
    for number, method in enumerate(methods):
        own = sorted(
            (line for line in lines if line["method"] == method), key=lambda line: places[line["epsilon"]]
        )
        aside = 0.08 * (number - (len(methods) - 1) / 2)  # so that whiskers can be told apart
        spots = [places[line["epsilon"]] + aside for line in own]
        axes.plot(spots, [100 * line["f1"] for line in own], color=MARKS[method])
        for spot, line in zip(spots, own, strict=True):
            _point(axes, spot, line)
    for number, other in enumerate(others):
        spots = [places[epsilon] for epsilon, _ in other["points"]]
        values = [100 * value for _, value in other["points"]]
        axes.plot(
            spots,
            values,
            "sD^"[number % 3] + "--",
            color=COLORS[-1 - number],
            label=other["title"],
            lw=1,
            ms=5,
        )
    for method in ("majority", "untrained"):
        _level(axes, next(line for line in lines if line["method"] == method))
    axes.set_xticks(range(len(places)), [*(f"{epsilon:g}" for epsilon in budgets), "no privacy"])
    axes.set_xlabel("epsilon of each client, over the whole run")
    axes.set_ylabel("F1, points")
    axes.set_title("MTSamples with privacy (hollow: did not learn)")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # one a method
    axes.legend(handles.values(), handles.keys(), frameon=False)
    return figure


def _point(axes: plt.Axes, place: float, line: dict[str, Any]) -> None:
    """With its interval; hollow where the method did not learn."""
    low, high = (100 * bound for bound in line["interval"])
    color = MARKS[line["method"]]
    axes.vlines(place, low, high, color=color, lw=1)
    learned = line["learned"]
    fill = color if learned else "white"
    spot = ([place], [100 * line["f1"]])
    mark = axes.scatter(*spot, s=45, color=fill, edgecolors=color, zorder=3, label=NAMES[line["method"]])
    mark.set_gid("learned" if learned else "did not learn")
    axes.spines[["top", "right"]].set_visible(False)


def _level(axes: plt.Axes, line: dict[str, Any]) -> None:
    """A line across; the two floors lie close together, so one is named below, at the left."""
    axes.axhline(100 * line["f1"], color="#888888", lw=0.8, ls=LEVELS[line["method"]])
    side, place, lift = ("left", 0.01, -9) if line["method"] == "untrained" else ("right", 0.99, 2)
    axes.annotate(
        NAMES[line["method"]],
        (place, 100 * line["f1"]),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, lift),
        textcoords="offset points",
        ha=side,
        color="#666666",
        fontsize="small",
    )


def _bars(
    axes: plt.Axes, places: list[float], found: list[dict[str, float]], width: float, color: str, name: str
) -> None:
    medians = [spread["median"] for spread in found]
    below = [spread["median"] - spread["low"] for spread in found]
    above = [spread["high"] - spread["median"] for spread in found]
    axes.bar(places, medians, width, yerr=[below, above], color=color, label=name, error_kw={"lw": 0.8})


if __name__ == "__main__":
    main()
