"""The two pictures of docs/how-it-works.md: the rooms of the house, and a round.

    python docs/figures/pictures.py

The rooms and their order are read from the import contract in pyproject.toml; here stands what each is for.
"""

import io
import itertools
import tomllib
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image

HERE = Path(__file__).parent
INK, GREY, LINE = "#1b1f24", "#57606a", "#8c959f"
# (title, colour, {room: what it is for}); a room belongs to the group in which it stands.
GROUPS: list[tuple[str, str, dict[str, str]]] = [
    (
        "what people\nask for",
        "#dbe9f6",
        {
            "__main__": "the command: a verb, or overrides to train",
            "api": "the same from Python",
            "commands": "the verbs, thin: plan, list, show, doctor, watch",
            "sites": "kits, policy",
            "audit": "attacks",
            "sweep": "many runs",
            "theory": "the laboratory",
        },
    ),
    (
        "where\na run lives",
        "#e3dcf3",
        {
            "launch": "carry out a job in the runtime it names",
            "inprocess": "our own grid",
            "flower": "Flower's processes",
            "server_app": "Flower's server",
            "client_app": "a client's answer to a message, in every runtime",
        },
    ),
    (
        "a run and\nits pages",
        "#dcefe0",
        {
            "run": "one run from its first line to its last",
            "compare": "runs side by side, with statistics",
            "report": "pages and tables from a run's files",
        },
    ),
    (
        "methods",
        "#fde3c4",
        {
            "strategies": "one file a strategy: what the server says differently",
            "clients": "one file an algorithm: what a client does differently",
        },
    ),
    (
        "the round",
        "#dbe9f6",
        {
            "server": "base strategy, conversation, aggregation, server's step, hooks",
            "local": "a client's work: resident model, algorithm, both runners",
            "secure": "masks: the server learns sums",
            "fairness": "whom a model serves badly",
            "census": "what a site counts, and what of it may leave",
            "privacy": "what is clipped, noised and counted",
        },
    ),
    (
        "what is\nsaid, and\nof what",
        "#e3dcf3",
        {
            "align": "make one image-text model of two encoders",
            "exchange": "plan, order, ledger, cache, choice, codec, messages",
            "models": "models, their roles, what wraps them",
            "data": "tables, readers, partitions",
        },
    ),
    (
        "the ground",
        "#eaeef2",
        {
            "files": "what a run leaves on disk, and how it is read again",
            "config": "every setting with its default, bounds and sentence",
            "conf_files": "what can be chosen",
            "verb_table": "what each verb takes",
            "registry": "names, and where they lie",
            "arguments": "words after a verb",
            "digests": "",
            "seeds": "",
            "logs": "",
            "words": "",
            "errors": "",
            "bundles": "",
            "streams": "",
            "signals": "",
            "declared": "",
        },
    ),
]


def layers() -> list[list[str]]:
    """The rooms as the contract stacks them, the highest first; those of one line do not know each other."""
    settings = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())
    (contract,) = (one for one in settings["tool"]["importlinter"]["contracts"] if one["type"] == "layers")
    return [[room.strip().rpartition(".")[2] for room in line.split("|")] for line in contract["layers"]]


def canvas(width: float, height: float) -> tuple[plt.Figure, Axes]:
    """Axes in inches, from the lower left corner."""
    figure = plt.figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, edge: str = LINE) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=colour,
            edgecolor=edge,
            linewidth=0.9,
        )
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: object) -> None:
    look = {"arrowstyle": "-|>", "color": INK, "lw": 1.5, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 14}
    axes.annotate("", xy=end, xytext=start, arrowprops=look | style)


# The rooms ------------------------------------------------------------------------------------------------

ROW, GAP, BETWEEN = 0.36, 0.05, 0.14  # inches


def rooms() -> plt.Figure:
    stack = layers()
    group_of = {room: number for number, (_, _, own) in enumerate(GROUPS) for room in own}
    says = {room: text for _, _, own in GROUPS for room, text in own.items()}
    turns = [group_of[line[0]] for line in stack]
    changes = sum(before != after for before, after in itertools.pairwise(turns))
    height = len(stack) * (ROW + GAP) + changes * BETWEEN + 0.75
    figure, axes = canvas(10.6, height)
    left, right = 1.35, 9.35
    y = height - 0.2
    spans: dict[int, tuple[float, float]] = {}  # by group: its upper and its lower end
    for number, line in enumerate(stack):
        if number and turns[number] != turns[number - 1]:
            y -= BETWEEN
        y -= ROW + GAP
        top, _ = spans.get(turns[number], (y + ROW, y))
        spans[turns[number]] = top, y
        width = (right - left - GAP * (len(line) - 1)) / len(line)
        for place, room in enumerate(line):
            x = left + place * (width + GAP)
            box(axes, x, y, width, ROW, GROUPS[group_of[room]][1])
            middle = y + ROW / 2 - 0.01
            if len(line) == 1:
                axes.text(x + 0.12, middle, room, va="center", weight="bold", size=11, color=INK)
                axes.text(x + 1.45, middle, says[room], va="center", size=10.5, color=INK)
            else:
                name = axes.text(x + 0.1, middle, room, va="center", weight="bold", size=11, color=INK)
                if says[room]:
                    taken = name.get_window_extent(figure.canvas.get_renderer()).width / figure.dpi
                    axes.text(x + 0.2 + taken, middle, says[room], va="center", size=10, color=INK)
    for group, (top, bottom) in spans.items():
        axes.text(
            left - 0.15,
            (top + bottom) / 2,
            GROUPS[group][0],
            ha="right",
            va="center",
            size=10.5,
            color=GREY,
            linespacing=1.15,
        )
    arrow(axes, (right + 0.3, height - 0.2), (right + 0.3, y), lw=2)
    axes.text(
        right + 0.62,
        (height - 0.2 + y) / 2,
        "a room may import what stands below it, and nothing above or beside it",
        rotation=270,
        ha="center",
        va="center",
        size=11,
        color=INK,
    )
    axes.text(
        left,
        0.16,
        "strategies/ and clients/ lie beside fedfrozen_app/, which holds all the others.",
        size=10.5,
        color=GREY,
    )
    return figure


# A round --------------------------------------------------------------------------------------------------

Steps = list[tuple[str, str, str]]  # the seam, if it is one; its title; what happens

BEFORE: Steps = [
    ("", "Greet", "nodes that are new\nsay who they are"),
    ("plan", "Plan", "what trains, travels and stays\nprivate, in which phases"),
    ("", "Base", "digests of the parameters, and of\nthe arrays that come beside them"),
    ("", "Ledger", "leaves out what this client\nhas confirmed"),
]
HELLO: Steps = [("", "Hello", "the number of a partition,\nor the name of a site")]
CLIENT: Steps = [
    ("", "Base", "complete it from the message\nand the cache; check digests"),
    ("algorithm", "Start", "private parameters, and\nthe arrays it has kept"),
    ("choice", "Choose", "its own layers of the plan,\nwhere clients choose"),
    ("algorithm", "Train", "phase by phase: the loss,\non the names that train"),
    ("algorithm", "Finish", "what to keep, and what\nto send beside the model"),
    ("", "Keep", "private parameters and kept\narrays stay with the client"),
    ("codec", "Encode", "what travels up"),
]
AFTER: Steps = [
    ("codec", "Decode", "then check names, shapes,\ntypes, figures, order"),
    ("aggregator", "Add", "to a running sum, one weight\nfor each name; drop the reply"),
    ("", "Mean", "update of each parameter, and\nthe mean of each namespace"),
    ("server's step", "Step", "from the mean update\nto the next model"),
    ("", "Close", "evaluate; write the row and\nthe checkpoint; perhaps stop"),
]
SEAM, CORE, ACCENT = "#fde3c4", "#f3f5f7", "#953800"
STEP, TALL = 0.68, 0.56  # inches from box to box, and of a box
LANE, LEFT, RIGHT = 4.75, 0.25, 6.6  # width of a lane, and where the two begin


def round_picture() -> plt.Figure:
    width, height = RIGHT + LANE + 0.25, 10.95
    figure, axes = canvas(width, height)
    for x, title in ((LEFT, "server"), (RIGHT, "each client of the cohort")):
        axes.add_patch(Rectangle((x, 0.55), LANE, height - 1.1, facecolor="#fbfcfd", edgecolor="#d0d7de"))
        axes.text(x + LANE / 2, height - 0.36, title, ha="center", size=13, weight="bold", color=INK)

    def draw(x: float, top: float, steps: Steps) -> list[float]:
        """From `top` down; the middle of each box."""
        middles = [top - number * STEP - TALL / 2 for number in range(len(steps))]
        for y, (seam, title, text) in zip(middles, steps, strict=True):
            box(axes, x + 0.14, y - TALL / 2, LANE - 0.28, TALL, SEAM if seam else CORE)
            axes.text(x + 0.26, y, title, va="center", size=11.5, weight="bold", color=INK)
            axes.text(x + 1.12, y, text, va="center", size=10.3, color=INK, linespacing=1.2)
            axes.text(
                x + LANE - 0.24,
                y,
                seam.replace(" ", "\n"),
                ha="right",
                va="center",
                size=9.8,
                style="italic",
                color=ACCENT,
            )
        return middles

    top = height - 0.72
    before = draw(LEFT, top, BEFORE)
    draw(RIGHT, top, HELLO)
    client = draw(RIGHT, before[-1] + TALL / 2, CLIENT)
    after = draw(LEFT, client[-1] + TALL / 2, AFTER)
    ends = LEFT + LANE - 0.14, RIGHT + 0.14
    middle = sum(ends) / 2

    def message(y: float, title: str, text: str, *, up: bool, dashed: bool = False) -> None:
        start, end = ends[::-1] if up else ends
        arrow(axes, (start, y), (end, y), **({"linestyle": (0, (4, 3)), "lw": 1.2} if dashed else {}))
        axes.text(middle, y + 0.06, title, ha="center", va="bottom", size=11.5, weight="bold", color=INK)
        axes.text(middle, y - 0.09, text, ha="center", va="top", size=10, color=GREY, linespacing=1.25)

    message(before[0], "hello", "its name, and what\na site's disk holds", up=True, dashed=True)
    message(before[-1], "order", "plan, settings,\ndigests, and the\narrays it lacks", up=False)
    message(after[0], "reply", "shared arrays,\nnamespace/name,\nrows, figures", up=True)
    lacks = "What is missing\nor damaged there\nit asks for, and\ngets it in the\nsame round."
    axes.text(middle, before[-1] - 0.95, lacks, ha="center", va="top", size=10, color=GREY, linespacing=1.25)

    y = client[-1] - TALL / 2 - 0.3
    axes.text(RIGHT + 0.2, y, "Arrays beside parameters", va="top", size=11.5, weight="bold", color=INK)
    spaces = (
        ("come", "with the order, as part of its base"),
        ("stay", "with the client, between its rounds"),
        ("train", "there, beside the parameters"),
        ("go", "back with the reply, and are averaged"),
    )
    for number, (word, text) in enumerate(spaces):
        line = y - 0.42 - 0.27 * number
        axes.text(RIGHT + 0.32, line, word, va="center", size=10.3, style="italic", color=ACCENT)
        axes.text(RIGHT + 1.12, line, text, va="center", size=10.3, color=INK)
    rule = "They are named namespace/name, have the role of\ntheir parameter, and follow the plan as it does."
    axes.text(RIGHT + 0.2, y - 1.52, rule, va="top", size=10.3, color=INK, linespacing=1.25)

    for x, colour, text in (
        (LEFT + 0.14, SEAM, "a method may say this differently, at the seam named"),
        (RIGHT + 0.14, CORE, "the same for every method"),
    ):
        axes.add_patch(Rectangle((x, 0.17), 0.3, 0.2, facecolor=colour, edgecolor=LINE, linewidth=0.9))
        axes.text(x + 0.42, 0.27, text, va="center", size=10.3, color=INK)
    return figure


def main() -> None:
    plt.rcParams["font.family"] = "DejaVu Sans"
    for name, draw in (("rooms", rooms), ("round", round_picture)):
        figure = draw()
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=150)
        # Few colours: a third of the bytes, and nobody can tell.
        Image.open(drawn).convert("RGB").quantize(64).save(HERE / f"{name}.png", optimize=True)
        plt.close(figure)


if __name__ == "__main__":
    main()
