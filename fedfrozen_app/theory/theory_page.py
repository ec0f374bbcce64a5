"""One self-contained page that explains the figures in plain words."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.report.html import png_text, render_page, save
from fedfrozen_app.theory import explanations, figures
from fedfrozen_app.theory.accuracy import Scores, evaluate, read_result, scores_of
from fedfrozen_app.theory.descent import Outcome
from fedfrozen_app.theory.figures import Outcomes
from fedfrozen_app.theory.problem import Setting
from fedfrozen_app.theory.studies import (
    SWITCH,
    TABLE_WARMUPS,
    Regret,
    TableCheck,
    check_table,
    describe,
    evaluate_auto,
    full_size_controls,
    grid,
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


@dataclass(frozen=True)
class Section:
    """A section of the page: an optional paragraph, picture, table and command, in this order."""

    title: str = ""
    text: str = ""
    png: str = ""
    head: Sequence[str] = ()
    body: Sequence[Sequence[str]] = ()
    command: str = ""


def write_page(
    folder: Path, outcomes: Outcomes, value_frozen: Tensor, results: Path, about: dict[str, Any]
) -> Path:
    """Write `theory.html` with all figures (also as separate files), and `theory.json` with the numbers."""
    found = {study: read_result(results, study) for study in ("digits", "layers", "cifar10")}
    scores = {study: scores_of(result["cells"]) for study, result in found.items() if result}
    _draw(folder, outcomes, value_frozen, scores)
    check, regrets = check_table(outcomes), evaluate_auto(outcomes)
    ablation = _ablation(outcomes, value_frozen)
    controls = {describe(each): _by_share(outcomes[each]) for each in full_size_controls()}
    seeds = len(next(iter(outcomes.values())).final)
    numbers = {
        "seeds": seeds,
        "table": [{"heterogeneity": h, "local_steps": t, "final": row} for (h, t), row in check.rows.items()],
        "table_wrong_signs": check.wrong,
        "ablation": ablation,
        "controls": controls,
        "auto": [_regret_record(each) for each in regrets],
        **about,
    }
    replace_file(folder / "theory.json", json.dumps(numbers, indent=2))
    fill = {"seeds": seeds, "switch": SWITCH, **ablation, **_real_models(scores)}
    explained = [*explanations.SECTIONS, *([explanations.CIFAR10] if "cifar10" in scores else [])]
    sections = [
        Section(text=explanations.INTRODUCTION.format(**fill)),
        *(_figure(folder, title, file, text.format(**fill)) for title, file, text in explained),
        _final_table(check),
        _share_table(controls),
        _regret_table(regrets),
        *(part for study, result in found.items() if result for part in _accuracy_tables(study, result)),
        Section("To repeat it", command=str(about["command"])),
    ]
    return _save("The theory laboratory", sections, folder / "theory.html")


def write_controls(
    folder: Path,
    lines: Sequence[Mapping[str, Any]],
    calmed: Sequence[Mapping[str, Any]],
    about: dict[str, Any],
) -> Path:
    """Write one figure per group, `controls.json` with the numbers, and `controls.html` with everything."""
    replace_file(folder / "controls.json", json.dumps({"lines": lines, "calm": calmed, **about}, indent=1))
    sections = [Section(text=explanations.CONTROLS.format(**about))]
    for group, (title, text) in explanations.CONTROL_SECTIONS.items():
        own = [line for line in lines if line["group"] == group]
        figures.control(own, folder / f"{group}.png")
        explained = _figure(folder, title, f"{group}.png", text)
        sections.append(replace(explained, head=CONTROL_HEAD, body=[control_row(line) for line in own]))
    rows = [[f"{row['group']}: {row['label']}", _interval(row["difference"])] for row in calmed]
    head = ["constant rate", "never freezing under cosine, less its best warm-up"]
    sections.append(Section(head=head, body=rows))
    return _save("Controls of the theory laboratory", sections, folder / "controls.html")


def _save(title: str, sections: Sequence[Section], path: Path) -> Path:
    save(render_page("sections.html", title, sections=sections), path)
    return path


def _draw(folder: Path, outcomes: Outcomes, value_frozen: Tensor, scores: Mapping[str, Scores]) -> None:
    figures.profile(outcomes, folder / "profile.png")
    figures.local_steps(outcomes, folder / "local_steps.png")
    figures.selection(outcomes, value_frozen, folder / "selection.png")
    figures.federation(outcomes, folder / "federation.png")
    figures.heterogeneity(outcomes, scores.get("digits"), folder / "heterogeneity.png")
    figures.fidelity(outcomes, scores.get("layers"), folder / "fidelity.png")
    if "cifar10" in scores:
        figures.accuracies("cifar10", scores["cifar10"], folder / "cifar10.png")


def _figure(folder: Path, title: str, file: str, text: str) -> Section:
    return Section(title, text.strip(), png_text((folder / file).read_bytes()))


def _real_models(scores: Mapping[str, Scores]) -> dict[str, str]:
    """The page's text about the studies with real Transformers, or that they are missing."""
    known = {"digits": explanations.DIGITS, "layers": explanations.LAYERS}
    return {
        study: text if study in scores else explanations.MISSING.format(study=study)
        for study, text in known.items()
    }


# Tables ----------------------------------------------------------------------------------------------------


def _final_table(check: TableCheck) -> Section:
    head = ["heterogeneity, local steps", *(f"{warmup}" for warmup in TABLE_WARMUPS)]
    body = [[f"{h:g}, {t}", *(f"{value:.3f}" for value in row)] for (h, t), row in check.rows.items()]
    return Section("Final F by warm-up", head=head, body=body)


def _share_table(controls: Mapping[str, Mapping[str, float]]) -> Section:
    body = [[name, *(f"{value:.3f}" for value in row.values())] for name, row in controls.items()]
    title = "A decaying rate, an equal budget, softmax"
    return Section(title, explanations.SHARES, head=["setting", *grid(1)], body=body)


def _regret_table(regrets: Sequence[Regret]) -> Section:
    body = [
        [
            describe(each.setting),
            str(each.best),
            str(sorted(each.chosen)[len(each.chosen) // 2]),
            f"{each.regret:+.1%}",
            f"{each.behind_never:+.1%}",
        ]
        for each in regrets
    ]
    head = ["setting", "best fixed", "auto (median)", "regret", "against never freezing"]
    return Section("Does auto find it?", explanations.REGRET, head=head, body=body)


def _regret_record(regret: Regret) -> dict[str, Any]:
    """One entry of theory.json."""
    return {
        "setting": describe(regret.setting),
        "best_fixed": regret.best,
        "auto": regret.chosen,
        "regret": regret.regret,
        "behind_never": regret.behind_never,
    }


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


def _ablation(outcomes: Outcomes, value_frozen: Tensor) -> dict[str, float]:
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


def _accuracy_tables(study: str, result: dict[str, Any]) -> list[Section]:
    scores = scores_of(result["cells"])
    labels = list(next(iter(scores.values())))
    rows = []
    for setting, by_warmup in scores.items():
        cells = (100 * sum(seeds.values()) / len(seeds) for seeds in (by_warmup[label] for label in labels))
        rows.append([setting, *(f"{value:.1f}" for value in cells)])
    found = [Section(f"Test accuracy by warm-up: {study}", head=["setting", *labels], body=rows)]
    if verdicts := evaluate(result["cells"]):
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
        found.append(Section(text=explanations.ACCURACY, head=head, body=body))
    return found


def _stops(stops: Sequence[int | None]) -> str:
    return ", ".join("never" if stop is None else str(stop) for stop in stops)
