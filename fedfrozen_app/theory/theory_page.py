"""One page that explains the figures in plain words, with everything in it."""

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.report.html import box, command, document, save, table
from fedfrozen_app.theory import explanations, figures
from fedfrozen_app.theory.accuracy import judge, read_result, scores_of
from fedfrozen_app.theory.descent import Outcome
from fedfrozen_app.theory.problem import Setting
from fedfrozen_app.theory.studies import (
    SWITCH,
    TABLE_WARMUPS,
    check_table,
    describe,
    full_size_controls,
    grid,
    judge_auto,
)

CONTROL_HEAD = [
    "setting",
    *grid(1),
    "best",
    "best less never",
    "auto, median",
    "auto never froze",
    "regret",
    "against never freezing",
    "still falls",
]


def write_page(
    folder: Path,
    outcomes: Mapping[Setting, Outcome],
    value_frozen: Tensor,
    results: Path,
    about: dict[str, Any],
) -> Path:
    """Figures beside `theory.html`, which holds copies of them, and the numbers in `theory.json`."""
    found = {study: read_result(results, study) for study in ("digits", "layers", "cifar10")}
    scores = {study: scores_of(result["cells"]) for study, result in found.items() if result}
    figures.profile(outcomes, folder / "profile.png")
    figures.local_steps(outcomes, folder / "local_steps.png")
    figures.selection(outcomes, value_frozen, folder / "selection.png")
    figures.federation(outcomes, folder / "federation.png")
    figures.heterogeneity(outcomes, scores.get("digits"), folder / "heterogeneity.png")
    figures.fidelity(outcomes, scores.get("layers"), folder / "fidelity.png")
    if "cifar10" in scores:
        figures.accuracies("cifar10", scores["cifar10"], folder / "cifar10.png")

    check, regrets = check_table(outcomes), judge_auto(outcomes)
    ablation = _ablation(outcomes, value_frozen)
    controls = {describe(each): _by_share(outcomes[each]) for each in full_size_controls()}
    seeds = len(next(iter(outcomes.values())).final)
    numbers = {
        "seeds": seeds,
        "table": [{"heterogeneity": h, "local_steps": t, "final": row} for (h, t), row in check.rows.items()],
        "table_wrong_signs": check.wrong,
        "ablation": ablation,
        "controls": controls,
        "auto": [
            {
                "setting": describe(each.setting),
                "best_fixed": each.best,
                "auto": each.chosen,
                "regret": each.regret,
                "behind_never": each.behind_never,
            }
            for each in regrets
        ],
        **about,
    }
    replace_file(folder / "theory.json", json.dumps(numbers, indent=2))

    final = table(
        ["heterogeneity, local steps", *(f"{warmup}" for warmup in TABLE_WARMUPS)],
        [[f"{h:g}, {t}", *(f"{value:.3f}" for value in row)] for (h, t), row in check.rows.items()],
    )
    auto = table(
        ["setting", "best fixed", "auto (median)", "regret", "against never freezing"],
        [
            [
                describe(each.setting),
                str(each.best),
                str(sorted(each.chosen)[len(each.chosen) // 2]),
                f"{each.regret:+.1%}",
                f"{each.behind_never:+.1%}",
            ]
            for each in regrets
        ],
    )
    fill = {
        "seeds": seeds,
        "switch": SWITCH,
        **ablation,
        "digits": explanations.DIGITS if "digits" in scores else explanations.MISSING.format(study="digits"),
        "layers": explanations.LAYERS if "layers" in scores else explanations.MISSING.format(study="layers"),
    }
    sections = [*explanations.SECTIONS, *([explanations.CIFAR10] if "cifar10" in scores else [])]
    blocks = [_text(explanations.INTRODUCTION.format(**fill))]
    blocks += [_section(folder, title, picture, text.format(**fill)) for title, picture, text in sections]
    blocks.append(f"<h2>Final F by warm-up</h2>{box(final)}")
    shares = table(
        ["setting", *grid(1)],
        [[name, *(f"{value:.3f}" for value in row.values())] for name, row in controls.items()],
    )
    blocks.append(
        f"<h2>A decaying rate, an equal budget, softmax</h2>{_text(explanations.SHARES)}{box(shares)}"
    )
    blocks.append(f"<h2>Does auto find it?</h2>{_text(explanations.REGRET)}{box(auto)}")
    for study, result in found.items():
        if result:
            blocks.append(_accuracy_table(study, result))
    path = folder / "theory.html"
    blocks.append(f"<h2>To repeat it</h2>{command(str(about['command']))}")
    title = "The theory laboratory"
    save(document(title, f"<h1>{title}</h1>", "\n".join(blocks), []), path)
    return path


def write_controls(
    folder: Path,
    lines: Sequence[Mapping[str, Any]],
    calmed: Sequence[Mapping[str, Any]],
    about: dict[str, Any],
) -> Path:
    """A figure a group, the numbers in `controls.json`, and `controls.html` with all of them."""
    replace_file(folder / "controls.json", json.dumps({"lines": lines, "calm": calmed, **about}, indent=1))
    blocks = [_text(explanations.CONTROLS.format(**about))]
    for group, (title, text) in explanations.CONTROL_SECTIONS.items():
        own = [line for line in lines if line["group"] == group]
        figures.control(own, folder / f"{group}.png")
        blocks.append(_section(folder, title, f"{group}.png", text))
        blocks.append(box(table(CONTROL_HEAD, [control_row(line) for line in own])))
    rows = [[f"{row['group']}: {row['label']}", _interval(row["difference"])] for row in calmed]
    head = ["constant rate", "never freezing under cosine, less its best warm-up"]
    blocks.append(box(table(head, rows)))
    path = folder / "controls.html"
    title = "Controls of the theory laboratory"
    save(document(title, f"<h1>{title}</h1>", "\n".join(blocks), []), path)
    return path


def control_row(line: Mapping[str, Any]) -> list[str]:
    return [
        line["label"],
        *(f"{line['final'][label][0]:.3f}" for label in grid(1)),
        line["best"],
        _interval(line["best_against_never"]),
        f"{line['auto_median']:.0%}",
        f"{line['auto_never_froze']:.0%}",
        f"{line['auto_regret']:+.1%}",
        f"{line['auto_behind_never']:+.1%}",
        f"{line['still_falls']:+.1%}",
    ]


def _interval(values: Sequence[float]) -> str:
    mean, low, high = values
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def _ablation(outcomes: Mapping[Setting, Outcome], value_frozen: Tensor) -> dict[str, float]:
    final = outcomes[Setting()].final.mean(0)
    return {
        "kernel": final[SWITCH].item(),
        "value": value_frozen[:, -1].mean().item(),
        "never": final[-1].item(),
        "start": final[0].item(),
    }


def _by_share(outcome: Outcome) -> dict[str, float]:
    final = outcome.final.mean(0)
    return {label: final[warmup].item() for label, warmup in grid(len(final) - 1).items()}


def _accuracy_table(study: str, result: dict[str, Any]) -> str:
    scores = scores_of(result["cells"])
    labels = list(next(iter(scores.values())))
    rows = []
    for setting, by_warmup in scores.items():
        cells = (100 * sum(seeds.values()) / len(seeds) for seeds in (by_warmup[label] for label in labels))
        rows.append([setting, *(f"{value:.1f}" for value in cells)])
    text = f"<h2>Test accuracy by warm-up: {escape(study)}</h2>{box(table(['setting', *labels], rows))}"
    verdicts = judge(result["cells"])
    if verdicts:
        body = [
            [v.setting, v.best, f"{v.regret:+.2f}", f"{v.behind_never:+.2f}", _stops(v.stops)]
            for v in verdicts
        ]
        head = [
            "setting",
            "best fixed",
            "regret of auto, points",
            "behind FedAvg, points",
            "auto froze after",
        ]
        text += _text(explanations.ACCURACY) + box(table(head, body))
    return text


def _stops(stops: Sequence[int | None]) -> str:
    return ", ".join("never" if stop is None else str(stop) for stop in stops)


def _text(paragraph: str) -> str:
    return f'<p class="text">{escape(paragraph.strip())}</p>'


def _section(folder: Path, title: str, picture: str, paragraph: str) -> str:
    data = base64.b64encode((folder / picture).read_bytes()).decode()
    image = f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">'
    return f"<h2>{escape(title)}</h2>{_text(paragraph)}<figure>{image}</figure>"
