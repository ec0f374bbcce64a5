"""The real epsilon of runs with `secure_aggregation.noise=sum`, by another library, against the claimed one.

    python benchmarks/sum_epsilon.py

For each set-up the app's own functions say how large every client's share of the noise is. What the sums then
cost a unit of one client is composed by dp-accounting (privacy loss distributions). The victim is the client
that it costs most. Columns:

    all stay    cohorts as the seed draws them, nobody leaves
    threshold   as many clients leave each round as may, those with the largest shares first
    colluders   and of those who stay, as many as the threat model names tell the server their shares
    hostile     and the server draws the victim in every round, and tells each site what it likes of
                participations
    before      the shares as each client sized them for its own participations, at the threshold
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import dp_accounting
import torch
from common import RESULTS, show, write_result
from dp_accounting.pld import PLDAccountant

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import Masking, TrainRequest
from fedfrozen_app.privacy.accountant import solve_noise
from fedfrozen_app.privacy.steps import NOISE, SENSITIVITY
from fedfrozen_app.privacy.sum_noise import noise_of_run
from fedfrozen_app.secure.bounds import least_needed
from fedfrozen_app.secure.roster import Entry, Roster, Terms
from fedfrozen_app.secure.work import carriers_of, noise_share, rules_of, survivors_of
from fedfrozen_app.server.sampling import draw_cohort

WEIGHTS = 650  # of the model: a linear one on the digits
RATE, CLIP = 0.5, 1.0  # learning rate and clipping bound
GRID = 1e-4  # of the privacy loss; a coarser one is faster, and never gives less


@dataclass(frozen=True)
class Setup:
    clients: int
    participation: float
    rounds: int
    epsilon: float
    delta: float | None = None
    threshold: float = 2 / 3
    min_cohort: int = 3
    seed: int = 0


SETUPS = (
    Setup(20, 0.3, 8, 4.0, threshold=1.0),
    Setup(20, 0.3, 8, 4.0),
    Setup(20, 0.3, 8, 4.0, seed=1),
    Setup(10, 1.0, 30, 8.0),
    Setup(10, 1.0, 30, 2.0),
    Setup(3, 1.0, 10, 1.0),
    Setup(5, 1.0, 20, 1.0, threshold=0.5),
    Setup(6, 1.0, 1, 0.5, delta=1e-6),
    Setup(40, 0.25, 20, 3.0, threshold=0.8),
    Setup(100, 0.1, 50, 6.0),
    Setup(100, 1.0, 10, 1.0),
    Setup(12, 0.5, 15, 4.0, min_cohort=6, threshold=0.5),
)


@dataclass(frozen=True)
class Shares:
    """One round's: of each client the noise, in units of what one unit can change in the sum."""

    own: float
    survivors: int
    colluders: int


def shares_of(setup: Setup, cohort: int) -> Shares:
    """By the functions that a client calls."""
    words = ["secure_aggregation=on", "secure_aggregation.noise=sum", "privacy=dp_sgd"]
    words += ["client.optimizer=sgd", "client.weight_decay=0", f"client.lr={RATE}"]
    words += [f"privacy.epsilon={setup.epsilon}", f"num_rounds={setup.rounds}"]
    words += [f"secure_aggregation.threshold={setup.threshold}", "secure_aggregation.max_examples=200"]
    words += [f"secure_aggregation.min_cohort={setup.min_cohort}"]
    words += [f"privacy.delta={setup.delta}"] if setup.delta else []
    config = read(resolved(compose_config(words)))
    settings = {key: value for key, value in asdict(config.secure_aggregation).items() if key != "name"}
    request = TrainRequest(1, Plan(("w",), ("w",), ()), {}, masking=Masking("0" * 32, settings))
    entries = tuple(Entry(f"{n:04}", b"", b"", b"", b"", b"") for n in range(cohort))
    roster = Roster(Terms("0" * 32, "0" * 64, 1, setup.threshold, None), entries)
    rules, owed = rules_of(request, cohort), {SENSITIVITY: RATE * CLIP}
    owed[NOISE] = noise_of_run(config).multiplier
    change = RATE * CLIP * rules.scale("", ()) + math.sqrt(WEIGHTS)
    share = noise_share(WEIGHTS, rules, carriers_of(request, roster), owed)
    return Shares(share / change, survivors_of(request, roster), roster.colluders)


@lru_cache(maxsize=256)
def epsilon_of_sums(noise: tuple[float, ...], delta: float) -> float:
    """What sums with so much noise, in units of what one unit changes, cost that unit."""
    accountant = PLDAccountant(value_discretization_interval=GRID)
    for one in sorted(set(noise)):
        accountant.compose(dp_accounting.GaussianDpEvent(one), noise.count(one))
    return float(accountant.get_epsilon(delta))


def cohorts_of(setup: Setup) -> list[list[str]]:
    names = [str(number) for number in range(setup.clients)]
    return [draw_cohort(names, setup.participation, setup.seed, r) for r in range(1, setup.rounds + 1)]


def most_drawn(cohorts: Sequence[Sequence[str]]) -> int:
    names = {name for cohort in cohorts for name in cohort}
    return max(sum(name in cohort for cohort in cohorts) for name in names)


def real_epsilon(setup: Setup) -> dict[str, float]:
    delta, cohorts = setup.delta or 1e-5, cohorts_of(setup)
    shares = shares_of(setup, len(cohorts[0]))
    honest = shares.survivors - shares.colluders
    rounds = {"all stay": most_drawn(cohorts), "threshold": most_drawn(cohorts)}
    rounds |= {"colluders": most_drawn(cohorts), "hostile": setup.rounds}
    count = {"all stay": len(cohorts[0]), "threshold": shares.survivors, "colluders": honest}
    count["hostile"] = honest
    found = {
        name: epsilon_of_sums((shares.own * math.sqrt(count[name]),) * rounds[name], delta) for name in rounds
    }
    return found | {"before": before(setup, cohorts, delta)}


def before(setup: Setup, cohorts: Sequence[Sequence[str]], delta: float) -> float:
    """Shares of sigma / √needed, with each client's sigma for the rounds in which it is drawn."""
    drawn = {name: sum(name in cohort for cohort in cohorts) for cohort in cohorts for name in cohort}
    sigma = {
        name: solve_noise(1.0, times, epsilon=setup.epsilon, delta=delta, kind="rdp")
        for name, times in drawn.items()
    }
    needed = least_needed(len(cohorts[0]), setup.threshold)
    found = []
    for victim in sigma:
        noise = []
        for cohort in (cohort for cohort in cohorts if victim in cohort):
            others = sorted(sigma[name] for name in cohort if name != victim)[: needed - 1]
            noise.append(math.sqrt((sigma[victim] ** 2 + sum(one**2 for one in others)) / needed))
        found.append((sum(1 / one**2 for one in noise), tuple(noise)))
    return epsilon_of_sums(max(found)[1], delta)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    rows, kept = [], []
    for setup in SETUPS:
        real = real_epsilon(setup)
        cohort = round(setup.participation * setup.clients)
        shares = shares_of(setup, cohort)
        kept.append({**asdict(replace(setup)), "cohort": cohort, **asdict(shares), "real": real})
        sizes = f"{setup.clients}, {cohort} × {setup.rounds}"
        set_ = f"{shares.survivors}, {shares.colluders}"
        rows.append([sizes, f"{setup.threshold:.2f}", set_, f"{setup.epsilon:g}"])
        rows[-1] += [f"{value:.3f}" for value in real.values()]
    path = RESULTS / "sum_epsilon.json"
    write_result("sum_epsilon", {"setups": kept}, path)
    head = ["clients, cohort × rounds", "threshold", "stay, collude", "claimed"]
    head += ["all stay", "threshold", "colluders", "hostile", "before"]
    show("Real epsilon by PLD", head, rows, {}, path)


if __name__ == "__main__":
    main()
