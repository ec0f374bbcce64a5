"""The picture of the three pacings: four clients, one of them slow, by the rules that runs use.

python docs/figures/pacings.py
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from fedfrozen_app.clock.client_time import ClientTime
from fedfrozen_app.clock.event_queue import Assignment
from fedfrozen_app.config import PacingConfig
from fedfrozen_app.server.make_pacer import make_pacer
from fedfrozen_app.server.pacer import ClosedRound, DeadlinePacer

TARGET = Path(__file__).with_name("pacings.png")
INK, GREY, BUSY, FRESH, STALE = "#1b1f24", "#57606a", "#a9cfe8", "#009e73", "#e69f00"
SECONDS = {"0": 2.0, "1": 3.0, "2": 3.5, "3": 8.0}
END = 17.0
PACINGS = {
    "synchronous: each round waits for the slowest": PacingConfig(),
    "deadline: a round closes after 4 s (pacing.seconds=4)": PacingConfig(name="deadline", seconds=4.0),
    "buffered: all are at work, a step at every 2 replies (pacing.buffer=2)": PacingConfig(
        name="buffered", concurrency=4, buffer=2
    ),
}


def schedule(config: PacingConfig) -> list[tuple[float, ClosedRound]]:
    """When each round closed, and what happened in it."""
    pacer = make_pacer(config, 0, 1.0) or DeadlinePacer(config, 0)  # without a deadline it waits for all
    rounds = []
    while pacer.now < END:
        number = len(rounds) + 1

        def ask(clients: Sequence[str], at: float, number: int = number) -> list[Assignment]:
            return [Assignment(one, number, at, ClientTime(0, 0, SECONDS[one], 0)) for one in clients]

        closed = pacer.run_round(number, list(SECONDS), ask)
        rounds.append((pacer.now, closed))
    return rounds


def draw(axes: Axes, title: str, rounds: list[tuple[float, ClosedRound]]) -> None:
    ages = {
        (one.client, one.version): number - one.version
        for number, (_, closed) in enumerate(rounds, 1)
        for one in closed.used
    }
    lines = {client: len(SECONDS) - 1 - place for place, client in enumerate(SECONDS)}
    for one in (one for _, closed in rounds for one in closed.asked):
        y, width = lines[one.client], one.time.total
        axes.add_patch(Rectangle((one.asked_at, y + 0.15), width, 0.7, facecolor=BUSY, edgecolor="white"))
        age = ages.get((one.client, one.version))
        if age is None or one.replies_at > END:
            continue
        colour = STALE if age else FRESH
        axes.add_patch(Rectangle((one.replies_at - 0.12, y + 0.15), 0.12, 0.7, facecolor=colour))
        if age:
            place = (one.replies_at - 0.2, y + 0.5)
            axes.annotate(f"τ={age}", place, ha="right", va="center", fontsize=8, color=INK)
    for at in (at for at, _ in rounds if at <= END):
        axes.axvline(at, color=INK, linewidth=1)
    steps = sum(at <= END for at, _ in rounds)
    axes.set_title(f"{title}: {steps} steps", loc="left", fontsize=9, color=INK)
    axes.set_yticks([line + 0.5 for line in lines.values()], [f"client {client}" for client in lines])
    axes.set_xlim(0, END)
    axes.set_ylim(0, len(lines))
    axes.tick_params(labelsize=8, colors=GREY, length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def picture() -> plt.Figure:
    figure, parts = plt.subplots(len(PACINGS), 1, figsize=(8, 5), sharex=True, layout="constrained")
    for axes, (title, config) in zip(parts, PACINGS.items(), strict=True):
        draw(axes, title, schedule(config))
    parts[-1].set_xlabel(
        "virtual seconds. Lines: the server's steps. Green: a fresh reply; orange: one that is τ steps old",
        fontsize=8,
        color=GREY,
    )
    return figure


if __name__ == "__main__":
    picture().savefig(TARGET, dpi=120)
