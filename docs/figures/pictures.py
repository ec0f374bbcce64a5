"""The drawn pictures of the pages: the rooms of the code, a round, a site, privacy, and the report.

    python docs/figures/pictures.py
    python docs/figures/pictures.py --report RUN     the annotated report of a run; needs chromium

The order of the rooms is read from the import contract in pyproject.toml; GROUPS has what each is for.
"""

import argparse
import io
import itertools
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image

HERE = Path(__file__).parent
INK, GREY, LINE = "#1b1f24", "#57606a", "#8c959f"
# (title, colour, {room: what it is for}), in the contract's order. The first room of a line gives its title.
GROUPS: list[tuple[str, str, dict[str, str]]] = [
    (
        "what people\nask for",
        "#dbe9f6",
        {
            "__main__": "the command: a verb, or overrides to train",
            "commands": "the verbs and the Python API",
            "audit": "attacks",
            "sweep": "many runs",
            "theory": "tiny model",
            "align": "encoders",
            "forget": "rollback",
            "capsule": "run it again",
            "calibration": "how sure?",
            "desk": "approvals",
            "monitoring": "numbers",
        },
    ),
    (
        "where\na run lives",
        "#e3dcf3",
        {
            "launch": "start a job in the runtime that it names",
            "sites": "kits, policy, executor",
            "runtimes": "in process, Ray, Flower",
            "server_app": "Flower's server",
            "client_app": "Flower's client",
            "run": "from configuration to results",
        },
    ),
    (
        "methods",
        "#fde3c4",
        {
            "strategies": "methods, server side",
        },
    ),
    (
        "pages, clients",
        "#dcefe0",
        {
            "report": "pages, charts",
            "handlers": "replies",
            "baselines": "plain models",
        },
    ),
    (
        "methods",
        "#fde3c4",
        {
            "clients": "client side",
        },
    ),
    (
        "the round",
        "#dbe9f6",
        {
            "server": "members, round, mean",
            "local": "worker, step, both runners",
            "study": "survival studies over sites",
            "census": "counts and fairness",
            "secure": "masks: the server learns sums",
            "privacy": "clipping, noise, accounting",
            "adapters": "LoRA, prompts, merged deltas",
        },
    ),
    (
        "models, data\nand messages",
        "#e3dcf3",
        {
            "models": "architectures, roles",
            "data": "tables, readers, partitions",
            "exchange": "plan, request, ledger",
            "clock": "virtual time",
        },
    ),
    (
        "foundation",
        "#eaeef2",
        {
            "files": "the run folder",
            "config": "schema",
            "vmap": "GPU kernels",
            "tasks": "losses",
            "survival": "Cox",
            "core": "errors, seeds, digests, registry, verb table, logs",
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
MOST = 5  # rooms beside each other: more are drawn below one another


def divided(line: list[str]) -> list[list[str]]:
    """A line of rooms in rows of about one length."""
    rows = -(-len(line) // MOST)
    size = -(-len(line) // rows)
    return [line[start : start + size] for start in range(0, len(line), size)]


def rooms() -> plt.Figure:
    stack = [part for line in layers() for part in divided(line)]
    group_of = {room: number for number, (_, _, own) in enumerate(GROUPS) for room in own}
    purpose = {room: text for _, _, own in GROUPS for room, text in own.items()}
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
                axes.text(x + 1.45, middle, purpose[room], va="center", size=10.5, color=INK)
            else:
                name = axes.text(x + 0.1, middle, room, va="center", weight="bold", size=11, color=INK)
                if purpose[room]:
                    taken = name.get_window_extent(figure.canvas.get_renderer()).width / figure.dpi
                    axes.text(x + 0.2 + taken, middle, purpose[room], va="center", size=10, color=INK)
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
        "a room may import the rooms below it, none above it and none on its own line",
        rotation=270,
        ha="center",
        va="center",
        size=11,
        color=INK,
    )
    axes.text(
        left,
        0.16,
        "strategies/ and clients/ stand beside fedfrozen_app/. audit to monitoring are one line.",
        size=10.5,
        color=GREY,
    )
    return figure


# A round --------------------------------------------------------------------------------------------------

Steps = list[tuple[str, str, str]]  # the seam, if it is one; its title; what happens

BEFORE: Steps = [
    ("", "Greet", "new nodes send\ntheir names"),
    ("plan", "Plan", "what trains, travels and stays\nprivate, in which phases"),
    ("", "Base", "digests of the parameters and\nof the server state"),
    ("", "Ledger", "skips what this client\nhas confirmed"),
]
HELLO: Steps = [("", "Hello", "the number of a partition,\nor the name of a site")]
CLIENT: Steps = [
    ("", "Base", "complete it from the message\nand the cache; check digests"),
    ("algorithm", "Start", "private parameters and\nclient state"),
    ("choice", "Choose", "its own layers of the plan,\nwhere clients choose"),
    ("algorithm", "Train", "phase by phase: the loss,\non the names that train"),
    ("algorithm", "Finish", "what to keep, and what to\nsend besides parameters"),
    ("", "Keep", "private parameters and\nclient state, locally"),
    ("codec", "Encode", "what travels up"),
]
AFTER: Steps = [
    ("codec", "Decode", "check names, shapes, types,\nmetrics, request digest"),
    ("aggregator", "Add", "to a running sum, one weight\nper name; drop the reply"),
    ("", "Mean", "update of each parameter, and\nthe mean of each namespace"),
    ("server's step", "Step", "from the mean update\nto the next model"),
    ("", "Close", "evaluate; write the metrics row\nand the checkpoint"),
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

    message(before[0], "hello", "its name, and what\na site has cached", up=True, dashed=True)
    message(before[-1], "train request", "plan, settings,\ndigests, and the\narrays it lacks", up=False)
    message(after[0], "reply", "shared arrays,\nnamespace/name,\nrows, metrics", up=True)
    lacks = "The client asks\nfor arrays that are\nmissing or damaged\nand gets them in\nthe same round."
    axes.text(middle, before[-1] - 0.95, lacks, ha="center", va="top", size=10, color=GREY, linespacing=1.25)

    y = client[-1] - TALL / 2 - 0.3
    axes.text(RIGHT + 0.2, y, "Arrays besides parameters", va="top", size=11.5, weight="bold", color=INK)
    spaces = (
        ("from_server", "sent with the train request"),
        ("client_state", "kept by the client between rounds"),
        ("trainable_state", "the part of it that trains"),
        ("to_server", "sent with the reply and averaged"),
    )
    for number, (word, text) in enumerate(spaces):
        line = y - 0.42 - 0.27 * number
        axes.text(RIGHT + 0.32, line, word, va="center", size=10.3, style="italic", color=ACCENT)
        axes.text(RIGHT + 1.55, line, text, va="center", size=10.3, color=INK)
    rule = "They are named namespace/name, have the role of\ntheir parameter, and follow the plan."
    axes.text(RIGHT + 0.2, y - 1.52, rule, va="top", size=10.3, color=INK, linespacing=1.25)

    for x, colour, text in (
        (LEFT + 0.14, SEAM, "a method may override this, at the seam named"),
        (RIGHT + 0.14, CORE, "the same for every method"),
    ):
        axes.add_patch(Rectangle((x, 0.17), 0.3, 0.2, facecolor=colour, edgecolor=LINE, linewidth=0.9))
        axes.text(x + 0.42, 0.27, text, va="center", size=10.3, color=INK)
    return figure


# A site ---------------------------------------------------------------------------------------------------

GOOD, STOP = "#dcefe0", "#f8d9d6"
EXECUTOR = """The site's own package
checks the proposal
against view and policy,
trains, clips, and adds
noise or masks.

It has no network."""
Block = tuple[float, float, float, float, str, str, str]  # place, size, colour, title, text


def blocks(axes: Axes, found: Sequence[Block]) -> None:
    for x, y, width, height, colour, title, text in found:
        box(axes, x, y, width, height, colour)
        axes.text(x + 0.14, y + height - 0.14, title, va="top", size=11.5, weight="bold", color=INK)
        axes.text(x + 0.14, y + height - 0.42, text, va="top", size=10.2, color=INK, linespacing=1.25)


def site_picture() -> plt.Figure:
    figure, axes = canvas(11.4, 5.6)
    for x, width, title in ((0.2, 7.2, "a site"), (9.0, 2.2, "the server")):
        axes.add_patch(Rectangle((x, 0.5), width, 4.5, facecolor="#fbfcfd", edgecolor="#d0d7de"))
        axes.text(x + width / 2, 5.2, title, ha="center", size=13, weight="bold", color=INK)
    blocks(
        axes,
        [
            (0.4, 3.45, 2.0, 1.35, SEAM, "Data", "rows, pictures, texts:\nthey stay here"),
            (0.4, 2.05, 2.0, 1.1, SEAM, "View", "site.yaml: what a\nrun may train on"),
            (0.4, 0.65, 2.0, 1.1, SEAM, "Policy", "policy.yaml: what\nmay leave, epsilon"),
            (
                2.95,
                2.05,
                2.1,
                2.75,
                GOOD,
                "Executor",
                EXECUTOR,
            ),
            (2.95, 0.65, 2.1, 1.1, SEAM, "A person", "approves each run\nby its hash"),
            (5.6, 2.05, 1.6, 2.75, CORE, "SuperNode", "calls the server;\nno open port"),
            (5.6, 0.65, 1.6, 1.1, CORE, "Audit log", "all that was\nasked and sent"),
            (9.2, 2.95, 1.8, 1.85, CORE, "nginx", "the only door:\nasks everybody\nfor a certificate"),
            (
                9.2,
                0.65,
                1.8,
                2.0,
                CORE,
                "SuperLink,\nserver app",
                "\naverages the\nupdates, evaluates\non its own rows",
            ),
        ],
    )
    for start, end in (
        ((2.4, 4.1), (2.95, 4.1)),
        ((2.4, 2.6), (2.95, 2.6)),
        ((2.4, 1.45), (2.95, 2.2)),
        ((4.0, 1.75), (4.0, 2.05)),
        ((5.05, 2.3), (5.6, 1.6)),
        ((10.1, 2.95), (10.1, 2.65)),
    ):
        arrow(axes, start, end)
    arrow(axes, (5.05, 3.4), (5.6, 3.4), arrowstyle="<|-|>")
    messages = (
        (4.25, True, "proposal,\ntrain request", "settings, digests,\nmodel"),
        (3.05, False, "reply", "update, rounded\nnumber of rows"),
    )
    for y, inwards, title, text in messages:
        ends = ((9.2, y), (7.2, y)) if inwards else ((7.2, y), (9.2, y))
        arrow(axes, *ends)
        axes.text(8.2, y + 0.07, title, ha="center", va="bottom", size=10.8, weight="bold", color=INK)
        axes.text(8.2, y - 0.08, text, ha="center", va="top", size=9.8, color=GREY, linespacing=1.2)
    axes.text(0.2, 0.2, "Orange: written or done by the site's people. TLS both ways.", size=10.3, color=GREY)
    return figure


# Privacy --------------------------------------------------------------------------------------------------

PROTECTION: list[tuple[str, list[tuple[str, str]]]] = [  # by setting: (colour, what it learns)
    (
        "plain",
        [(STOP, "each site's update:\nrows can be rebuilt"), (STOP, "the model: what it\nremembers of rows")],
    ),
    (
        "secure_aggregation=on",
        [(SEAM, "sums of updates over\nmin_cohort sites"), (STOP, "the model: what it\nremembers of rows")],
    ),
    (
        "privacy=dp_sgd",
        [
            (SEAM, "each update, noised:\nepsilon bounds one row"),
            (GOOD, "the model:\nepsilon bounds one row"),
        ],
    ),
    (
        "both",
        [
            (GOOD, "sums of noised updates:\nepsilon bounds one row"),
            (GOOD, "the model:\nepsilon bounds one row"),
        ],
    ),
    (
        "both, noise=sum\n(less noise)",
        [
            (SEAM, "noised sums; epsilon if few\nsites conspire with it"),
            (GOOD, "the model:\nepsilon bounds one row"),
        ],
    ),
]


def privacy_picture() -> plt.Figure:
    height, width, tall = 5.1, 2.75, 0.74
    figure, axes = canvas(8.35, height)
    for number, title in enumerate(("the server learns", "a reader of the model learns")):
        x = 2.4 + number * (width + 0.15)
        axes.text(x + width / 2, height - 0.35, title, ha="center", size=12, weight="bold", color=INK)
    for row, (setting, cells) in enumerate(PROTECTION):
        y = height - 0.65 - (row + 1) * (tall + 0.08)
        axes.text(2.25, y + tall / 2, setting, ha="right", va="center", size=10.8, weight="bold", color=INK)
        for number, (colour, text) in enumerate(cells):
            x = 2.4 + number * (width + 0.15)
            box(axes, x, y, width, tall, colour)
            place = x + width / 2, y + tall / 2
            axes.text(*place, text, ha="center", va="center", size=10.3, color=INK, linespacing=1.25)
    axes.text(0.15, 0.12, "Rows never leave a client, whatever the setting.", size=10.3, color=GREY)
    return figure


# The report -----------------------------------------------------------------------------------------------

PAGE, CROP = (1100, 2600), 2240  # pixels of the page, and how much of it is shown
NOTES = [  # where on the page, and what it says
    (205, "How the run ended: the last round, the best one, the\none that validation chose, bytes, time."),
    (
        470,
        "Accuracy on the server's test and validation rows, and\nof clients before and after local training.",
    ),
    (640, "The dotted line: here the attention kernel was frozen."),
    (
        850,
        "Bytes of each round by role. After the freeze queries\nand keys are not sent any more.",
    ),
    (1240, "How far clients' updates lie apart (rms), against\ntheir common movement."),
    (
        1600,
        "The best, the median and the worst client on its own\nheld-out rows: an average hides the worst.",
    ),
    (2040, "Each client in each round. Blank: it took no part.\nHere client 4 is served badly throughout."),
]


def screenshot(run: Path) -> Image.Image:
    page = (run / "report.html").resolve().as_uri()
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "page.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        options += ["--hide-scrollbars", "--virtual-time-budget=4000", f"--user-data-dir={folder}/profile"]
        options += [f"--window-size={PAGE[0]},{PAGE[1]}", f"--screenshot={picture}", page]
        subprocess.run(["chromium", *options], check=True, capture_output=True)
        with Image.open(picture) as found:
            return found.convert("RGB")


def report_picture(run: Path) -> plt.Figure:
    page = screenshot(run).crop((0, 0, PAGE[0], CROP))
    scale = 6.2 / PAGE[0]  # inches of a pixel
    height = CROP * scale
    figure, axes = canvas(11.1, height)
    axes.imshow(page, extent=(0, 6.2, 0, height), aspect="auto", interpolation="lanczos")
    axes.set_xlim(0, 11.1)
    axes.set_ylim(0, height)
    for number, (pixel, text) in enumerate(NOTES, 1):
        y = height - pixel * scale
        arrow(axes, (6.45, y), (6.15, y), lw=1.2, mutation_scale=11)
        axes.text(6.62, y, str(number), va="center", size=12, weight="bold", color=ACCENT)
        axes.text(6.85, y, text, va="center", size=10.2, color=INK, linespacing=1.3)
    return figure


def save(figure: plt.Figure, name: str, colours: int = 64) -> None:
    """Few colours: a third of the bytes, with no visible difference."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    Image.open(drawn).convert("RGB").quantize(colours).save(HERE / f"{name}.png", optimize=True)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="The drawn pictures of the pages.")
    parser.add_argument("--report", type=Path, metavar="RUN", help="the annotated report of this run alone")
    options = parser.parse_args()
    plt.rcParams["font.family"] = "DejaVu Sans"
    if options.report:
        save(report_picture(options.report), "report", 256)
        return
    drawn = (("rooms", rooms), ("round", round_picture), ("site", site_picture), ("privacy", privacy_picture))
    for name, draw in drawn:
        save(draw(), name)


if __name__ == "__main__":
    main()
