"""Controls: what else could explain the gain of freezing? Small problems, many seeds, comparable warm-ups."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fedfrozen_app.theory.descent import auto_stops, freeze, in_processes, objective, split, walk
from fedfrozen_app.theory.problem import Setting, make
from fedfrozen_app.theory.studies import BUDGET, Regret, band, default_rule, grid, regret

SMALL = Setting(clients=4, sequences=8)  # an eighth of the default's sequences, for many seeds
SPLITS = (1, 5, 10, 20, 40)  # local steps, with the same total budget
SOFTMAX_SMALL = replace(SMALL, feature_map="softmax", lr=0.1, rounds=60)  # never freezing levels off


@dataclass(frozen=True)
class Control:
    group: str
    label: str
    setting: Setting


def controls() -> list[Control]:
    def both_rates(setting: Setting) -> dict[str, Setting]:
        return {"constant rate": setting, "cosine": replace(setting, lr_schedule="cosine")}

    alike = replace(SMALL, kernel_spread=0, value_spread=0, input_spread=0)
    groups = {
        "budget": {
            f"{steps} x {BUDGET // steps}": replace(SMALL, local_steps=steps, rounds=BUDGET // steps)
            for steps in SPLITS
        },
        "rate": both_rates(SMALL),
        "softmax": both_rates(SOFTMAX_SMALL),
        "dials": {
            "kernels 0.7 and inputs 0.5": SMALL,
            "kernels 0.7": replace(alike, kernel_spread=0.7),
            "inputs 0.5": replace(alike, input_spread=0.5),
            "values 0.7": replace(alike, value_spread=0.7),
        },
    }
    return [Control(group, label, own) for group, lines in groups.items() for label, own in lines.items()]


# Walks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """The results of all seeds of one setting; the rounds of a long walk would not fit in memory."""

    final: Tensor  # (seeds, warm-ups of the grid)
    late: Tensor  # (seeds,) F after four fifths of the rounds, never frozen
    chosen: Tensor  # (seeds,) warm-up chosen by auto; the number of rounds if it never freezes
    auto: Tensor  # (seeds,) and its final F


def sweep(settings: Iterable[Setting], seeds: Sequence[int]) -> dict[Setting, Sweep]:
    order = sorted(set(settings), key=lambda s: -s.rounds)
    jobs = [(setting, some) for setting in order for some in split(seeds, _size(setting))]
    parts: dict[Setting, list[Sweep]] = {setting: [] for setting in order}
    for (setting, _), found in zip(jobs, in_processes(sweep_one, jobs), strict=True):
        parts[setting].append(found)
    return {setting: _join(found) for setting, found in parts.items()}


def _join(parts: Sequence[Sweep]) -> Sweep:
    """Concatenate results of groups of seeds."""
    return Sweep(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Sweep)))


def _size(setting: Setting) -> int:
    """The size of a seed's problem, in clients with the default number of sequences."""
    return -(-setting.cohort * setting.sequences // Setting.sequences)


def sweep_one(setting: Setting, seeds: tuple[int, ...]) -> Sweep:
    problem = make(setting, seeds)
    walked = walk(problem)
    along = objective(problem, walked)
    stops = auto_stops(setting, walked, along, default_rule(setting))
    chosen = [setting.rounds if stop is None else stop for stop in stops]
    warmups = list(grid(setting.rounds).values())
    after = sorted({*warmups, *chosen})
    final = freeze(problem, walked, after, along)[..., -1]
    own = final[range(len(chosen)), [after.index(warmup) for warmup in chosen]]
    late = along[:, round(0.8 * setting.rounds)]
    shown = final[:, [after.index(warmup) for warmup in warmups]]
    return Sweep(shown, late.clone(), torch.tensor(chosen), own)


# Verdicts --------------------------------------------------------------------------------------------------


def evaluate(control: Control, found: Sweep) -> Regret:
    """The regret as in the other studies, but half of the seeds choose the best fixed warm-up."""
    warmups = list(grid(control.setting.rounds).values())
    half = len(found.auto) // 2
    return regret(control.setting, warmups, found.final, found.chosen.tolist(), found.auto, half)


def estimate(values: Tensor) -> list[float]:
    """Mean over the seeds, and the ends of its 95 % confidence interval."""
    return [float(value) for value in band(values)]


def record(control: Control, found: Sweep) -> dict[str, Any]:
    """One line of controls.json. Differences are paired over the seeds; below 0: better than never."""
    labels, verdict = list(grid(control.setting.rounds)), evaluate(control, found)
    half, never = len(found.auto) // 2, found.final[:, -1]
    best = list(grid(control.setting.rounds).values()).index(verdict.best)
    by_warmup = dict(zip(labels, found.final.unbind(1), strict=True))
    return {
        "group": control.group,
        "label": control.label,
        "setting": asdict(control.setting),
        "final": {label: estimate(values) for label, values in by_warmup.items()},
        "against_never": {label: estimate(values - never) for label, values in by_warmup.items()},
        "still_falls": ((found.late - never).mean() / never.mean()).item(),  # in the last fifth, never frozen
        "best": labels[best],  # chosen on the first half of the seeds, evaluated on the other
        "best_against_never": estimate((found.final[:, best] - never)[half:]),
        "auto": estimate(found.auto),
        "auto_median": float(found.chosen.double().quantile(0.5)) / control.setting.rounds,
        "auto_never_froze": (found.chosen == control.setting.rounds).double().mean().item(),
        "auto_regret": verdict.regret,
        "auto_behind_never": verdict.behind_never,
        "auto_against_never": estimate(found.auto - never),
    }


def calm(lines: Sequence[Control], found: Mapping[Setting, Sweep]) -> list[dict[str, Any]]:
    """Paired difference: never freezing with a decaying rate minus the best warm-up with a constant rate."""
    rows = []
    for line in lines:
        decayed = replace(line.setting, lr_schedule="cosine")
        if line.group not in ("rate", "softmax") or decayed == line.setting:
            continue
        constant, half = found[line.setting].final, len(found[line.setting].auto) // 2
        best = int(constant[:half].mean(0).argmin())
        difference = found[decayed].final[:, -1] - constant[:, best]
        rows.append({"group": line.group, "label": line.label, "difference": estimate(difference[half:])})
    return rows
