"""The tables of docs/results/appendix/safl.md, from what benchmarks/safl.py has found."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

FIRST = "safl"  # the result file whose figures are drawn
NAMES = {
    "majority": "majority class",
    "untrained": "untrained model",
    "tfidf": "TF-IDF, logistic regression",
    "tfidf_whole": "TF-IDF, whole notes",
    "central": "central",
    "fedavg": "FedAvg",
    "all": "FedAvg, frozen embeddings",
    "safl": "SAFL",
    "random": "random layers",
    "once": "random layers, drawn once",
    "fixed": "fixed layers",
    "gradient": "by gradients",
    "head": "head alone",
}
SETS = {"mtsamples": "MTSamples", "maccrobat": "MACCROBAT"}
Line = Mapping[str, Any]


def report(found: Mapping[str, Any], options: argparse.Namespace) -> str:
    """All tables, and where they come from; `options` are those of the command that made them."""
    lines, pairs = found["lines"], found["pairs"]
    text = [about(found, options), ""]
    if found["cells_missing"]:
        text += [f"{found['cells_missing']} cells are missing yet: the tables will grow.", ""]
    for dataset, name in SETS.items():
        plain = [line for line in lines if line["dataset"] == dataset and line["epsilon"] is None]
        for count in dict.fromkeys(map(top_k, plain)):
            own = [line for line in plain if top_k(line) == count]
            head = f"**{name}**, K = {count}, without privacy, {own[0]['seeds']} seeds:"
            text += [head, "", *plain_table(own)]
    if options.name == FIRST:
        text += ["![F1 against bytes](../../figures/safl_bytes.png)", ""]
    if private := [line for line in lines if line["epsilon"] is not None]:
        seeds = sorted({line["seeds"] for line in private})  # a budget that is still running has fewer
        told = " to ".join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1])))
        head = f"**MTSamples**, epsilon per note and client over the whole run, {told} seeds:"
        text += [head, "", *private_table(private)]
        text += ["![F1 against epsilon](../../figures/safl_epsilon.png)", ""]
    text += ["**SAFL less the others**, on the same notes and seeds:", "", *pairs_table(pairs)]
    text += ["Is attention better than random layers by more than one point?", "", *answers(pairs)]
    return "\n".join(text)


def about(found: Mapping[str, Any], options: argparse.Namespace) -> str:
    where = found.get("gpu") or found["machine"]["processor"]
    text = (
        f"On {where}, torch {found['versions']['torch']}: {options.clients} clients, {options.rounds} rounds "
        f"of one epoch, batch {options.batch}, texts cut to {options.tokens['mtsamples']} and "
        f"{options.tokens['maccrobat']} tokens. Trials of every method: learning rates {_list(options.lrs)}. "
    )
    if options.epsilons:
        pairs = ", ".join(f"{lr:g} and {head_lr:g}" for lr, head_lr in options.private_rates)
        text += (
            f"With privacy: batch {options.private_batch}, learning rates of layers and head {pairs}, "
            f"clipping norms {_list(options.clips)}. "
        )
    return text + (
        "F1 in points, macro over classes, of MACCROBAT strict over entities, with 95 % intervals over notes "
        "and seeds. MB up are those of all clients in the whole run."
    )


def plain_table(lines: Sequence[Line]) -> list[str]:
    head = ["method", "F1", "accuracy", "MB up", "of FedAvg's", "learning rate", ""]
    whole = next((line["bytes_up"] for line in lines if line["method"] == "fedavg"), None)
    body = []
    for line in in_order(lines):
        sent = line.get("bytes_up") if line["method"] != "central" else None
        share = f"{100 * sent / whole:.0f} %" if sent and whole else "-"
        accuracy = f"{100 * line['accuracy']:.1f}" if "accuracy" in line else "-"
        body.append(
            [NAMES[line["method"]], f1(line), accuracy, megabytes(sent), share, rate(line), note(line)]
        )
    return rows_of(head, body)


def private_table(lines: Sequence[Line]) -> list[str]:
    """Every budget with its own floor."""
    head = [
        "method",
        "epsilon",
        "F1",
        "largest spent",
        "MB up",
        "learning rate, of the head",
        "clipping norm",
        "",
    ]
    body = []
    for epsilon in sorted({line["epsilon"] for line in lines}, reverse=True):
        for line in in_order([line for line in lines if line["epsilon"] == epsilon]):
            spent = f"{line['epsilon_spent']:.3f}" if "epsilon_spent" in line else "-"
            clip = f"{line['clip']:g}" if line.get("clip") else "-"
            row = [NAMES[line["method"]], f"{epsilon:g}", f1(line), spent, megabytes(line.get("bytes_up"))]
            own = f", {line['head_lr']:g}" if line.get("head_lr") else ""
            body.append([*row, rate(line) + own, clip, note(line)])
    return rows_of(head, body)


def pairs_table(pairs: Sequence[Line]) -> list[str]:
    head = ["data", "SAFL less", "points", "95 % interval", "more than one point"]
    body = []
    for pair in pairs:
        other = NAMES[pair["pair"].removeprefix("safl - ")]
        low, high = points(pair["low"]), points(pair["high"])
        body.append([where(pair), other, points(pair["mean"]), f"{low} to {high}", pair["more_than_a_point"]])
    return rows_of(head, body)


def answers(pairs: Sequence[Line]) -> list[str]:
    return [
        f"- {where(pair)}: **{pair['more_than_a_point']}** ({points(pair['mean'])} points, "
        f"{points(pair['low'])} to {points(pair['high'])})"
        for pair in pairs
        if pair["pair"] == "safl - random"
    ]


def in_order(lines: Sequence[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: list(NAMES).index(line["method"]))


def where(pair: Line) -> str:
    budget = "" if pair["epsilon"] is None else f" at epsilon {pair['epsilon']:g}"
    return f"{SETS[pair['dataset']]}, K = {top_k(pair)}{budget}"


def top_k(line: Line) -> int:
    return line.get("top_k", 2)  # older results do not say


def f1(line: Line) -> str:
    low, high = line["interval"]
    return f"{100 * line['f1']:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def points(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")


def megabytes(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e6:.0f}"


def rate(line: Line) -> str:
    return f"{line['lr']:g}" if "lr" in line else "-"


def note(line: Line) -> str:
    return "" if line.get("learned", True) else "did not learn"


def rows_of(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)] + [""]


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
