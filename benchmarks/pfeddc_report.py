"""The tables of docs/results/appendix/pfeddc.md, from what benchmarks/pfeddc.py has found."""

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

FIRST = "pfeddc"  # the result file that is the script's own
CLIENTS = {"domain": 4, "domain x3": 12, "domain x5": 20, "domain x12": 48}
PROMPTFL, PFEDDC, PROX = "text, global", "both, cross", "PromptFL + FedProx"
NAMES = {PROMPTFL: "PromptFL", PFEDDC: "pFedDC", "local only": "local prompts only"}
Cells = Mapping[str, Mapping[str, Any]]
Group = tuple[str, float, str]  # split, participation, method


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half the width of its 95 % interval (Student's t over seeds)."""
    if len(values) < 2:
        return statistics.fmean(values), None
    return statistics.fmean(values), float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))


def grouped(cells: Cells) -> dict[Group, dict[int, Mapping[str, Any]]]:
    """The sound cells of every set-up and method, by seed."""
    groups: dict[Group, dict[int, Mapping[str, Any]]] = {}
    for key, cell in cells.items():
        split, participation, method, seed = json.loads(key)
        if "personal" in cell:
            groups.setdefault((split, participation, method), {})[seed] = cell
    return groups


def tables(cells: Cells) -> list[dict[str, Any]]:
    """One line a set-up and method, over its seeds."""
    lines = []
    for (split, participation, method), found in grouped(cells).items():
        line: dict[str, Any] = {"split": split, "participation": participation, "method": method}
        line |= {"clients": CLIENTS[split], "seeds": len(found)}
        for model, figure in itertools.product(("global", "personal", "after"), ("mean", "worst", "std")):
            values = [cell[model][figure] for cell in found.values() if model in cell]
            if values:
                line[f"{model}_{figure}"], line[f"{model}_{figure}_ci"] = interval(values)
        first = next(iter(found.values()))
        line |= {key: first[key] for key in ("rates", "array_bytes_up_per_client")}
        line["fusion"] = [cell["fusion"]["state"] for cell in found.values() if cell["fusion"]]
        lines.append(line)
    return lines


# Markdown ------------------------------------------------------------------------------------------------


def figure(line: Mapping[str, Any] | None, key: str) -> str:
    """In per cent."""
    if line is None or key not in line:
        return "-"
    half = line[f"{key}_ci"]
    return f"{100 * line[key]:.1f}" + ("" if half is None else f" ± {100 * half:.1f}")


def rows_of(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)] + [""]


def main_table(lines: Mapping[Group, Mapping[str, Any]]) -> list[str]:
    """Everybody in every round, one client a domain and three."""
    head = ["method", "4 clients: mean", "worst", "12 clients: mean", "worst", "after"]
    head += ["bytes up, a client and round", "fusion"]
    body = []
    for method in ("zero-shot", "local only", PROMPTFL, PROX, PFEDDC):
        four, twelve = (lines.get((split, 1.0, method)) for split in ("domain", "domain x3"))
        if four is None and twelve is None:
            continue
        some = twelve or four or {}
        states = [state.removeprefix("fusion ") for one in (four, twelve) if one for state in one["fusion"]]
        found = [figure(line, f"personal_{key}") for line in (four, twelve) for key in ("mean", "worst")]
        sent = f"{some['array_bytes_up_per_client']:.0f}"
        active = f"active in {states.count('active')} of {len(states)}" if states else "-"
        body.append([NAMES.get(method, method), *found, figure(twelve, "after_mean"), sent, active])
    return rows_of(head, body)


def grid_table(lines: Mapping[Group, Mapping[str, Any]]) -> list[str]:
    """Mean (worst client) for every pair of modalities and fusion."""
    fusions = ("global", "sum", "cross")
    head = ["prompts on", *(f"{n} clients: {fusion}" for n in (4, 12) for fusion in fusions)]
    body = []
    for tower in ("text", "vision", "both"):
        found = [
            lines.get((split, 1.0, f"{tower}, {fusion}"))
            for split in ("domain", "domain x3")
            for fusion in fusions
        ]
        row = [f"{figure(line, 'personal_mean')} ({figure(line, 'personal_worst')})" for line in found]
        body.append([tower, *("-" if line is None else text for line, text in zip(found, row, strict=True))])
    return rows_of(head, body)


def federation_table(lines: Mapping[Group, Mapping[str, Any]]) -> list[str]:
    """Full participation beside a half, by the number of clients."""
    head = ["clients", "method", "all in every round: mean", "worst", "half: mean", "worst", "seeds"]
    body = []
    for (split, clients), method in itertools.product(CLIENTS.items(), ("local only", PROMPTFL, PFEDDC)):
        pair = [lines.get((split, share, method)) for share in (1.0, 0.5)]
        if any(pair):
            found = [figure(line, f"personal_{key}") for line in pair for key in ("mean", "worst")]
            seeds = "/".join(str(line["seeds"]) if line else "0" for line in pair)
            body.append([str(clients), NAMES[method], *found, seeds])
    return rows_of(head, body)


def differences(cells: Cells) -> list[str]:
    """pFedDC less the others on the same seeds: the same partition, so that their luck cancels."""
    groups = grouped(cells)
    body = []
    for split, other in itertools.product(
        CLIENTS, ("zero-shot", "local only", PROMPTFL, "both, global", "both, sum")
    ):
        own, its = (groups.get((split, 1.0, method), {}) for method in (PFEDDC, other))
        seeds = sorted(own.keys() & its.keys())
        if len(seeds) < 2:
            continue
        row = [str(CLIENTS[split]), NAMES.get(other, other)]
        for key in ("mean", "worst"):
            found = [own[seed]["personal"][key] - its[seed]["personal"][key] for seed in seeds]
            middle, half = interval(found)
            row.append(f"{100 * middle:+.1f} ± {100 * (half or 0):.1f}")
        body.append(row)
    return rows_of(["clients", "pFedDC less", "mean", "worst client"], body)


def gap_of(trial: Mapping[str, Any]) -> float:
    """How far the fused prompts ended from the global ones, at most; 0 where nothing is fused."""
    return max((value for key, value in trial.items() if key.startswith("fusion_gap")), default=0.0)


def trials_table(trials: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Every method's trials: prompts' rate, the fusion's where it has one, and the validation rows' word."""
    by_method: dict[str, list[str]] = {}
    for key, trial in trials.items():
        method, _ = json.loads(key)
        own, fusion = trial["rates"]
        words = f"{own:g}" if own == fusion else f"{own:g} & {fusion:g}"
        score = "diverged" if trial.get("score") is None else f"{100 * trial['score']:.1f}"
        gap = f" (gap {100 * gap_of(trial):.1f} %)" if gap_of(trial) and method.endswith("cross") else ""
        by_method.setdefault(method, []).append(f"{words}: {score}{gap}")
    body = [[NAMES.get(method, method), "; ".join(found)] for method, found in by_method.items()]
    return rows_of(["method", "rate: validation accuracy"], body)


def about(found: Mapping[str, Any]) -> str:
    """What was run, where, and on which model."""
    settings, aligned = found["settings"], found["alignment"]
    where = found["gpu"] or found["machine"]["processor"]
    slice_of = f" of the domain {settings['align_domain']}" if settings["align_domain"] else ""
    probe, zero, chance = (
        f"{100 * aligned[key]:.1f} %" for key in ("probe_accuracy", "zero_shot_accuracy", "chance")
    )
    return (
        f"{len(found['cells'])} runs on {where}, torch {found['versions']['torch']}: {settings['rounds']} "
        f"rounds of {settings['steps']} steps of {settings['optimizer']}, batch {settings['batch']}, "
        f"pictures of {settings['size']} pixels. Aligned on {aligned['rows']} rows{slice_of}; on "
        f"held-out rows of that slice a linear probe of DINOv2 reaches {probe}, zero-shot {zero}, "
        f"chance is {chance}. Accuracy in per cent on each "
        "client's own test rows, of the model the client would use, unweighted over clients; ± is the 95 % "
        "interval over seeds."
    )


def picture_of(name: str) -> Path:
    """In the folder of figures."""
    return Path("pfeddc", "fairness.png" if name == FIRST else f"fairness-{name}.png")


def report(found: Mapping[str, Any], name: str = FIRST) -> str:
    """All tables, and where they come from."""
    lines = {(line["split"], line["participation"], line["method"]): line for line in tables(found["cells"])}
    return "\n".join(
        [
            about(found),
            "",
            *main_table(lines),
            "`after` is the mean over 12 clients after one more local round. On the same seeds:",
            "",
            *differences(found["cells"]),
            "The ablation grid, mean (worst client):",
            "",
            *grid_table(lines),
            "Participation and more clients:",
            "",
            *federation_table(lines),
            "Rates were chosen by the clients' validation rows, on a partition that no table shows:",
            "",
            *trials_table(found["trials"]),
            f"![Clients from worst to best](../../figures/{picture_of(name)})",
        ]
    )


def fairness_lines(cells: Cells) -> dict[str, list[float]]:
    """All clients of all seeds of the 12-client federation, from worst to best."""
    groups, lines = grouped(cells), {}
    for method in ("zero-shot", "local only", PROMPTFL, "both, sum", PFEDDC):
        found = groups.get(("domain x3", 1.0, method)) or groups.get(("domain", 1.0, method), {})
        values = [one for cell in found.values() for one in cell["clients"]["personal"] if one is not None]
        if values:
            lines[NAMES.get(method, method)] = sorted(values)
    return lines
