"""Verbs over many runs."""

from pathlib import Path

from fedfrozen_app.core.verbs.verb import Verb, word

SWEEP_VERBS: dict[str, Verb] = {
    "search": Verb(
        "Search settings with Optuna: ranges in place of values, one run per trial.",
        (
            word("--trials", type=int, default=20, help="how many runs; default: 20"),
            word("--jobs", type=int, default=1, help="how many at once; default: 1"),
            word("--seed", type=int, default=0, help="of the sampler, not of the runs; default: 0"),
            word(
                "overrides",
                metavar="KEY=VALUE",
                nargs="*",
                help="settings; write what is searched as a range or a choice",
            ),
        ),
        ("fedfrozen search --trials 10 'client.lr=tag(log, interval(1e-4, 1e-2))' num_rounds=5",),
    ),
    "compare": Verb(
        "Compare finished runs: grouped by everything but the seed, tested against a baseline.",
        (
            word("folders", nargs="+", type=Path, metavar="DIR", help="runs, or folders that hold runs"),
            word(
                "--baseline",
                nargs="+",
                action="extend",
                default=[],
                metavar="KEY=VALUE",
                help="settings of the baseline; default: strategy=fedavg, where there is one",
            ),
            word(
                "--target",
                type=float,
                help="test accuracy to reach; default: the highest hundredth that every group reaches on "
                "average",
            ),
            word(
                "--figure",
                choices=("final", "selected", "best"),
                default="final",
                help="what is tested; default: final",
            ),
            word("--out", type=Path, help="where the files go; default: DIR if it is one, else this folder"),
        ),
        (
            "fedfrozen compare outputs/sweeps/NAME",
            "fedfrozen compare first second --baseline strategy=fedprox strategy.mu=0.1",
        ),
    ),
}
