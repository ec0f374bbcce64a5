"""The studies: their settings, and the numbers for their figures and tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from scipy.stats import t as student
from torch import Tensor

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.server.agreement import Rule
from fedfrozen_app.server.warmup import AUTO, Settings
from fedfrozen_app.theory.descent import Outcome, auto_stops, in_processes, objective, split, walk
from fedfrozen_app.theory.problem import Setting, make

LEVELS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)  # heterogeneity
LOCAL_STEPS = (1, 5, 10, 20, 40)
CLIENTS = (2, 4, 8, 16)
PARTICIPATION = (0.25, 0.5, 1.0)
FEATURE_MAPS = ("identity", "elu+1", "relu", "softmax")
SHARES = (0, 2, 5, 10, 20, 50, 80)  # % of the rounds, if not every warm-up is shown
BUDGET = 6000  # gradient steps of a client: 40 in each of 150 rounds
ROUNDS = Setting.rounds
SWITCH = 80  # round in which the ablation freezes

# The reference: (heterogeneity, local steps) -> final F, mean of three seeds, by an independent script.
TABLE_WARMUPS = (0, 5, 15, 40, 80, 150)
REFERENCE = {
    (0.0, 10): (1.803, 1.692, 1.214, 0.845, 0.508, 0.128),
    (0.0, 40): (1.803, 1.094, 0.671, 0.125, 0.114, 0.113),
    (0.5, 40): (1.847, 1.386, 1.041, 0.678, 0.512, 0.526),
    (1.0, 10): (1.889, 1.860, 1.757, 1.596, 1.460, 1.208),
    (1.0, 40): (1.892, 1.713, 1.503, 1.202, 1.168, 1.264),
    (2.0, 40): (1.800, 1.584, 1.496, 1.482, 1.484, 1.597),
}
CLEAR = 0.03  # a difference above this must have the reference's sign
CHOSEN_ON = 5  # the best fixed warm-up is chosen on seeds 0 to 4 and evaluated on the others


def table_settings() -> dict[tuple[float, int], Setting]:
    return {key: Setting(heterogeneity=key[0], local_steps=key[1]) for key in REFERENCE}


def all_settings() -> list[Setting]:
    return [
        *table_settings().values(),
        *(Setting(heterogeneity=level) for level in LEVELS),
        *(Setting(local_steps=steps) for steps in LOCAL_STEPS),
        *(Setting(clients=count) for count in CLIENTS),
        *(Setting(participation=share) for share in PARTICIPATION),
        *(Setting(feature_map=name) for name in FEATURE_MAPS),
        *full_size_controls(),
    ]


def full_size_controls() -> list[Setting]:
    """The two most decisive controls at the size of the other studies: a decaying rate, an equal budget."""
    return [
        Setting(),
        Setting(lr_schedule="cosine"),
        Setting(local_steps=10, rounds=BUDGET // 10),
        Setting(feature_map="softmax"),
        Setting(feature_map="softmax", lr_schedule="cosine"),
    ]


def grid(rounds: int) -> dict[str, int]:
    """Warm-ups that are comparable across runs of any length."""
    shares = {f"{share} %": round(share * rounds / 100) for share in SHARES}
    return shares | {"last": rounds - 1, "never": rounds}  # last: frozen in the last round alone


# The table -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableCheck:
    rows: dict[tuple[float, int], list[float]]  # mean final F at TABLE_WARMUPS
    compared: int  # pairs that differ clearly in the reference
    wrong: list[str]  # those whose sign is not the reference's
    finite: bool

    @property
    def passed(self) -> bool:
        return self.finite and not self.wrong


def check_table(outcomes: Mapping[Setting, Outcome]) -> TableCheck:
    """Compare with the reference: every clear difference within a row, paired over the seeds."""
    rows, wrong, compared, finite = {}, [], 0, True
    for key, setting in table_settings().items():
        final = outcomes[setting].final[:, list(TABLE_WARMUPS)]  # (seeds, warm-ups)
        finite &= bool(torch.isfinite(outcomes[setting].curves).all())
        rows[key] = final.mean(0).tolist()
        for one, other in combinations(range(len(TABLE_WARMUPS)), 2):
            expected = REFERENCE[key][one] - REFERENCE[key][other]
            if abs(expected) > CLEAR:
                compared += 1
                found = (final[:, one] - final[:, other]).mean().item()
                if found * expected <= 0:
                    pair = f"{TABLE_WARMUPS[one]} and {TABLE_WARMUPS[other]}"
                    wrong.append(
                        f"heterogeneity {key[0]:g}, {key[1]} steps, warm-up {pair}: {found:.3f}, "
                        f"not {expected:.3f}"
                    )
    return TableCheck(rows, compared, wrong, finite)


# Freezing the wrong block --------------------------------------------------------------------------------


def freeze_value(seeds: Sequence[int], setting: Setting | None = None, after: int = SWITCH) -> Tensor:
    """F after every round, (seeds, T+1), if the value block is frozen instead of the kernel."""
    setting = setting or Setting()
    jobs = [(setting, some, after) for some in split(seeds, setting.cohort)]
    return torch.cat(in_processes(_freeze_value, jobs))


def _freeze_value(setting: Setting, seeds: tuple[int, ...], after: int) -> Tensor:
    problem = make(setting, seeds)
    whole = walk(problem, until=after)
    rest = walk(problem, start=after, origin=whole, train="kernel")
    return torch.cat([objective(problem, whole), objective(problem, rest)[:, 1:]], dim=1)


# Automatic warm-up -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regret:
    """The regret of `auto` against the best fixed warm-up, as a share of the sweep's range."""

    setting: Setting
    best: int  # chosen on the first seeds
    chosen: list[int]  # by auto, on all seeds; T: never
    regret: float  # over the other seeds
    behind_never: float  # mean F of auto minus that of never freezing, same share, same seeds

    @property
    def passed(self) -> bool:
        return self.regret <= 0.05


def default_rule(setting: Setting) -> Rule:
    return Settings(warmup_rounds=AUTO).checked(setting.rounds).rule


def evaluate_auto(outcomes: Mapping[Setting, Outcome]) -> list[Regret]:
    found = []
    for setting, outcome in outcomes.items():
        stops = auto_stops(setting, outcome.walk, outcome.measures.objective, default_rule(setting))
        chosen = [setting.rounds if stop is None else stop for stop in stops]
        auto = outcome.final[range(len(chosen)), chosen]
        found.append(regret(setting, range(setting.rounds + 1), outcome.final, chosen, auto, CHOSEN_ON))
    return found


def regret(
    setting: Setting, warmups: Sequence[int], final: Tensor, chosen: list[int], auto: Tensor, seen: int
) -> Regret:
    """`final`: (seeds, warm-ups), the last is never freezing; the best is chosen on the first `seen`
    seeds."""
    best = int(final[:seen].mean(0).argmin())
    held, own = final[seen:], auto[seen:]
    scale = (held.mean(0).max() - held.mean(0).min()).item()
    behind, behind_never = ((own - held[:, place]).mean().item() / scale for place in (best, -1))
    return Regret(setting, warmups[best], chosen, behind, behind_never)


def describe(setting: Setting) -> str:
    """The differences from the default setting, in words."""
    steps = setting.local_steps
    words = [f"heterogeneity {setting.heterogeneity:g}", counted(steps, "local step")]
    if setting.clients != Setting.clients:
        words.append(counted(setting.clients, "client"))
    if setting.participation != 1:
        words.append(f"participation {setting.participation:g}")
    if setting.feature_map != "identity":
        words.append(setting.feature_map)
    if setting.rounds != Setting.rounds:
        words.append(counted(setting.rounds, "round"))
    if setting.lr != Setting.lr:
        words.append(f"rate {setting.lr:g}")
    if setting.lr_schedule != "constant":
        words.append(setting.lr_schedule)
    return ", ".join(words)


def band(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean over the seeds with its 95 % confidence band (Student's t: some studies have few seeds)."""
    width = float(student.ppf(0.975, len(values) - 1)) / len(values) ** 0.5
    mean, error = values.mean(0), width * values.std(0)
    return mean, mean - error, mean + error
