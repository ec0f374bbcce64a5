"""Verbs over many runs."""

from pathlib import Path

from fedfrozen_app.core.verbs.verb import TRUSTED, Verb, word

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
    "capsule": Verb(
        "Pack a sweep or a run into one file from which others run it again: rows, settings, code, digests.",
        (
            word("folder", metavar="SWEEP|RUN", help="the folder of a sweep, or of a run"),
            word(
                "--out", type=Path, required=True, metavar="FILE", help="the capsule to write, such as x.zip"
            ),
            word("--title", help="what it is about; default: the folder's name"),
            word("--author", default="The authors", help="who publishes it"),
            word("--url", default="", help="their page"),
            word("--license", default="Apache-2.0", metavar="SPDX", help="default: Apache-2.0"),
            TRUSTED,
        ),
        ("fedfrozen capsule outputs/sweeps/NAME --out paper.zip",),
        "The capsule is an RO-Crate 1.1. It holds no data: they are named by their digests.",
    ),
    "reproduce": Verb(
        "Check a capsule, and run its cells again. Exits 1 if a byte was changed or a claim does not hold.",
        (
            word("file", type=Path, metavar="FILE", help="a file of `fedfrozen capsule`"),
            word("--cells", type=int, metavar="N", help="run N cells again, drawn by digest; 0: none"),
            word(
                "--data",
                type=Path,
                action="append",
                default=[],
                metavar="PATH",
                help="data that it names; found by digest",
            ),
            word("--digest", metavar="HEX", help="the digest that its authors published"),
            word("--out", type=Path, metavar="DIR", help="where the runs go; default: FILE-reproduced"),
            TRUSTED,
        ),
        ("fedfrozen reproduce paper.zip --cells 0", "fedfrozen reproduce paper.zip --data notes.csv"),
        "A cell has the same bits, lies inside its interval, or outside.",
    ),
}
