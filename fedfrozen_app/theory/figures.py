"""The figures of the laboratory. Lines are means over the seeds, bands their 95 % confidence."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from torch import Tensor

from fedfrozen_app.files.disk import whole_file
from fedfrozen_app.report.curves import BLUE, GREEN, ORANGE, VERMILLION
from fedfrozen_app.server.agreement import Rule, ratio
from fedfrozen_app.theory.accuracy import AUTO, Scores
from fedfrozen_app.theory.attention_loss import SOFTMAX
from fedfrozen_app.theory.descent import Outcome, agreements, auto_stops
from fedfrozen_app.theory.problem import Setting
from fedfrozen_app.theory.studies import (
    CLIENTS,
    FEATURE_MAPS,
    LEVELS,
    LOCAL_STEPS,
    PARTICIPATION,
    SWITCH,
    band,
    default_rule,
)

Outcomes = Mapping[Setting, Outcome]
DPI = 140
COLOURS = (BLUE, GREEN, ORANGE, VERMILLION, "#CC79A7", "#56B4E9")


def _figure(columns: int, rows: int = 1, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.7 * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.92")
        ax.set_axisbelow(True)
    return figure, axes


def _line(ax: Axes, values: Tensor, label: str, colour: str, x: Sequence[float] | None = None) -> Tensor:
    """Mean and band of (seeds, places); returns the mean."""
    mean, low, high = band(values)
    x = list(range(values.shape[1])) if x is None else list(x)
    ax.plot(x, mean, color=colour, lw=1.7, label=label)
    ax.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
    return mean


def _label(ax: Axes, title: str, x: str, y: str = "", *, legend: bool = True) -> None:
    ax.set_title(title, loc="left", fontsize=11)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    if legend:  # below the axes: inside, it would cover a curve
        ax.legend(frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)


def _sweep(ax: Axes, lines: Sequence[tuple[str, Outcome]]) -> None:
    """Final F against the warm-up, its minimum marked by a dot and what `auto` takes by a star."""
    for (label, outcome), colour in zip(lines, COLOURS, strict=False):
        mean = _line(ax, outcome.final, label, colour)
        best = int(mean.argmin())
        ax.plot(best, mean[best], "o", color=colour, ms=6)
    ax.set_xlim(left=0)


def profile(outcomes: Outcomes, path: Path) -> None:
    figure, axes = _figure(2, 2, height=3.0)
    panels: list[tuple[str, Callable[[Outcome], Tensor]]] = [
        ("Profile P(Φ): the best F this kernel allows", lambda o: o.measures.profile),
        ("Its gradient norm ‖∇P(Φ)‖", lambda o: o.measures.slope),
        ("Kernel drift: clients' spread around their mean", lambda o: o.walk.kernel_drift.sqrt()),
        ("Distance ‖W − W*(Φ)‖ to the best value block", lambda o: o.measures.value_gap),
    ]
    for ax, (title, pick) in zip(axes, panels, strict=True):
        for level, colour in zip((0.0, 0.5, 1.0, 2.0), COLOURS, strict=False):
            _line(ax, pick(outcomes[Setting(heterogeneity=level)]), f"heterogeneity {level:g}", colour)
        _label(ax, title, "round of full training", legend=False)
    axes[1].set_yscale("log")
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=DPI)


def local_steps(outcomes: Outcomes, path: Path) -> None:
    figure, (left, right) = _figure(2)
    _sweep(left, [(_steps(n), outcomes[Setting(local_steps=n)]) for n in LOCAL_STEPS])
    _label(left, "Heterogeneity 1: final F by warm-up", "warm-up rounds (dot: the best)", "final F")
    for n, colour in zip(LOCAL_STEPS, COLOURS, strict=False):
        _line(right, outcomes[Setting(local_steps=n)].measures.profile, _steps(n), colour)
    _label(right, "The profile on the way, never frozen", "round", "P(Φ)")
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=DPI)


def _steps(count: int) -> str:
    return f"{count} local step{'s' * (count > 1)}"


def selection(outcomes: Outcomes, value_frozen: Tensor, path: Path) -> None:
    figure, (left, right) = _figure(2)
    outcome = outcomes[Setting()]
    _line(left, outcome.curves[:, Setting.rounds], "never freeze", COLOURS[3])
    # Before freezing, a run equals the one that never freezes: each is drawn from its freeze on.
    frozen = [(warmup, f"freeze after {warmup}", outcome.curves[:, warmup]) for warmup in (0, 15, SWITCH)]
    frozen.append((SWITCH, f"freeze the value after {SWITCH}", value_frozen))
    for (start, label, curve), colour in zip(frozen, (*COLOURS[:3], COLOURS[4]), strict=True):
        _line(left, curve[:, start:], label, colour, range(start, curve.shape[1]))
    _label(left, "Heterogeneity 1, 40 local steps", "round", "F")
    left.set_ylim(top=2.2)
    for (level, steps), colour in zip(((0.0, 10), (0.0, 40), (1.0, 10), (1.0, 40)), COLOURS, strict=False):
        setting = Setting(heterogeneity=level, local_steps=steps)
        _line(right, ratios(outcomes[setting], Rule()), f"heterogeneity {level:g}, {steps} steps", colour)
    right.axhline(Rule.threshold, color="0.3", ls=":", lw=1.2)
    right.annotate(
        "auto freezes below", (2, Rule.threshold), xytext=(0, -11), textcoords="offset points", fontsize=8.5
    )
    right.set_yscale("log")
    right.set_ylim(bottom=5e-4)
    _label(right, "What auto watches: agreement / drift", "round")
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=DPI)


def ratios(outcome: Outcome, rule: Rule) -> Tensor:
    """Agreement over drift in the window, (seeds, T), along the walk that never freezes."""
    agreement = agreements(outcome.walk)
    rows = [
        [ratio(a[: n + 1], d[: n + 1], rule.window) for n in range(len(a))]
        for a, d in zip(agreement.tolist(), outcome.walk.kernel_drift.tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def federation(outcomes: Outcomes, path: Path) -> None:
    figure, (left, right) = _figure(2)
    _sweep(left, [(f"{n} clients", outcomes[Setting(clients=n)]) for n in CLIENTS])
    _label(left, "Number of clients", "warm-up rounds (dot: the best)", "final F")
    shares = [
        (f"{share:.0%} of 8 a round", outcomes[Setting(participation=share)]) for share in PARTICIPATION
    ]
    _sweep(right, shares)
    _label(right, "Participation", "warm-up rounds (dot: the best)", "final F")
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=DPI)


def heterogeneity(outcomes: Outcomes, digits: Scores | None, path: Path) -> None:
    """The same trade-off in theory and, if they were run, on the digits."""
    figure, axes = _figure(2 if digits else 1)
    for level, colour in zip(LEVELS, COLOURS, strict=True):
        outcome = outcomes[Setting(heterogeneity=level)]
        share = torch.linspace(0, 100, outcome.final.shape[1]).tolist()
        mean = _line(axes[0], outcome.final, f"heterogeneity {level:g}", colour, share)
        best = int(mean.argmin())
        axes[0].plot(share[best], mean[best], "o", color=colour, ms=6)
        own = Setting(heterogeneity=level)
        stops = auto_stops(own, outcome.walk, outcome.measures.objective, default_rule(own))
        chosen = [Setting.rounds if stop is None else stop for stop in stops]
        auto = outcome.final[range(len(chosen)), chosen].mean()
        axes[0].plot(
            100 * sum(chosen) / len(chosen) / Setting.rounds, auto, "*", color=colour, ms=12, mec="white"
        )
    _label(axes[0], "Theory, 40 local steps", "warm-up, % of the rounds (dot: best, star: auto)", "final F")
    if digits:
        accuracy(axes[1], digits, "Digits, softmax attention")
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=DPI)


def accuracy(ax: Axes, scores: Scores, title: str) -> None:
    """Test accuracy against the warm-up, one line per setting; a star and a dashed line for `auto`."""
    for (name, by_warmup), colour in zip(scores.items(), COLOURS, strict=False):
        labels = sorted((label for label in by_warmup if label != AUTO), key=_percent)
        table = torch.tensor([list(by_warmup[label].values()) for label in labels], dtype=torch.float64).T
        x = range(len(labels))
        _line(ax, table, name, colour, x)
        ax.plot(x, table.mean(0), "o", color=colour, ms=4)
        auto = torch.tensor(list(by_warmup[AUTO].values()), dtype=torch.float64).unsqueeze(1)  # (seeds, 1)
        mean, low, high = (float(value) for value in band(auto))
        ax.axhline(mean, color=colour, ls="--", lw=0.9)
        ax.errorbar(len(labels), mean, [[mean - low], [high - mean]], color=colour, lw=1.5)
        ax.plot(len(labels), mean, "*", color=colour, ms=11, mec="white")
        ax.set_xticks(range(len(labels) + 1), [*(label.replace(" ", "") for label in labels), AUTO])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    _label(ax, title, "warm-up, % of the rounds", "test accuracy")


def _percent(label: str) -> int:
    return int(label.split()[0])


def fidelity(outcomes: Outcomes, layers: Scores | None, path: Path) -> None:
    figure, axes = _figure(2 if layers else 1)
    names = {name: name if name == SOFTMAX else f"φ = {name}" for name in FEATURE_MAPS}
    _sweep(axes[0], [(label, outcomes[Setting(feature_map=name)]) for name, label in names.items()])
    _label(axes[0], "Other feature maps, and softmax (theory)", "warm-up rounds (dot: the best)", "final F")
    if layers:
        accuracy(axes[1], layers, "Softmax attention on digits")
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=DPI)


def accuracies(study: str, scores: Scores, path: Path) -> None:
    """The figure of one study of real models."""
    figure, (ax,) = _figure(1)
    titles = {
        "digits": "Digits, softmax attention",
        "layers": "Softmax attention on digits",
        "cifar10": "CIFAR-10, ViT of width 192",
    }
    accuracy(ax, scores, titles[study])
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=DPI)


def control(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One group of the controls: final F by warm-up, and paired differences to never freezing."""
    figure, (left, right) = _figure(2)
    labels = list(lines[0]["final"])
    late = labels[labels.index("10 %") :]
    for line, colour in zip(lines, COLOURS, strict=False):
        for ax, key, shown in ((left, "final", labels), (right, "against_never", late)):
            mean, low, high = zip(*(line[key][label] for label in shown), strict=True)
            ax.plot(shown, mean, color=colour, lw=1.7, label=line["label"])
            ax.fill_between(shown, low, high, color=colour, alpha=0.18, lw=0)
            best = min(range(len(shown)), key=mean.__getitem__)
            ax.plot(best, mean[best], "o", color=colour, ms=6)
            auto, *ends = line["auto" if ax is left else "auto_against_never"]
            ax.plot(["auto"] * 2, ends, color=colour, lw=1.5)
            ax.plot("auto", auto, "*", color=colour, ms=11, mec="white")
    right.axhline(0, color="0.3", ls=":", lw=1.2)
    for ax in (left, right):
        ax.tick_params(axis="x", labelsize=8.5)
    _label(left, "Final F by warm-up", "warm-up (dot: the best)", "final F")
    _label(
        right, "Paired with never freezing", "warm-up (below 0: better than never)", "difference of final F"
    )
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=DPI)
