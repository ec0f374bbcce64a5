"""Pictures of the GPU benchmarks from their result files, in docs/figures: cohort.png and pfl_cifar.png.

python benchmarks/plots.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib
from common import RESULTS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
COLORS = ["#1f4e79", "#7fb2d9", "#c9d7e3", "#e0a458", "#b5651d"]


def main() -> None:
    for name, draw in {"cohort": cohort, "pfl_cifar": pfl_cifar}.items():
        result = json.loads((RESULTS / f"{name}.json").read_text())
        figure = draw(result)
        figure.savefig(FIGURES / f"{name}.png", dpi=130)
        print(f"Written to docs/figures/{name}.png")


def cohort(result: dict[str, Any]) -> plt.Figure:
    """Images a second, a group of bars a set-up; the whisker is the range over repeats."""
    cases = result["figures"]
    names = list(cases[0]["images_per_second"])
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for number, name in enumerate(names):
        found = [case["images_per_second"][name] for case in cases]
        places = [group + (number - (len(names) - 1) / 2) * 0.16 for group in range(len(cases))]
        _bars(axes, places, found, 0.15, COLORS[number], name)
    titles = [f"{case['clients']} x {case['batch']}, {case['split']}" for case in cases]
    axes.set_xticks(range(len(cases)), titles)
    axes.set_yscale("log")
    axes.set_ylabel("useful images a second (log)")
    axes.set_title(f"Whole rounds, ViT d=192 on CIFAR-10, {result.get('gpu', 'no GPU')}")
    axes.legend(ncols=3, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def pfl_cifar(result: dict[str, Any]) -> plt.Figure:
    """Milliseconds a round of each, and the accuracy it reached."""
    found, accuracy = result["figures"]["milliseconds_a_round"], result["figures"]["accuracy"]
    figure, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
    for place, (name, spread) in enumerate(found.items()):
        low, high = spread["median"] - spread["low"], spread["high"] - spread["median"]
        axes.barh(place, spread["median"], xerr=[[low], [high]], color=COLORS[0 if name == "ours" else 1])
        text = f"{spread['median']:.0f} ms, accuracy {accuracy[name]:.3f}"
        axes.text(spread["high"], place, "  " + text, va="center")
    axes.set_yticks(range(len(found)), list(found))
    axes.set_xlim(right=1.45 * max(spread["high"] for spread in found.values()))
    axes.set_xlabel("milliseconds a round")
    axes.set_title(f"pfl-research's CIFAR-10 benchmark, {result.get('gpu', 'no GPU')}")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _bars(
    axes: plt.Axes, places: list[float], found: list[dict[str, float]], width: float, color: str, name: str
) -> None:
    medians = [spread["median"] for spread in found]
    below = [spread["median"] - spread["low"] for spread in found]
    above = [spread["high"] - spread["median"] for spread in found]
    axes.bar(places, medians, width, yerr=[below, above], color=color, label=name, error_kw={"lw": 0.8})


if __name__ == "__main__":
    main()
