"""Verbs that check a run before it starts, or audit it afterwards."""

from argparse import ArgumentTypeError

from fedfrozen_app.core.verbs.verb import JSON, TRUSTED, Verb, word

SETTINGS = word("overrides", metavar="KEY=VALUE", nargs="*", help="settings, as for training")


def name_and_values(text: str) -> str:
    if "=" not in text:
        raise ArgumentTypeError(
            f"{text} has no values: write {text}=0,18,65,120 (edges) or {text}=F,M (words)"
        )
    return text


CHECK_VERBS: dict[str, Verb] = {
    "plan": Verb(
        "What would be trained, sent and kept, by role, and what memory that takes, before anything runs.",
        (
            SETTINGS,
            JSON,
            word(
                "--measure", action="store_true", help="take a few steps: seconds a round, and a GPU's memory"
            ),
        ),
        (
            "fedfrozen plan strategy=fedfrozen",
            "fedfrozen plan strategy=safl strategy.top_k=1 --json",
            "fedfrozen plan dataset=medquad dataset.path=DIR model=checkpoint model.path=DIR --measure",
        ),
    ),
    "methods": Verb(
        "Every strategy: what it trains, sends and keeps for your model, and its paper.",
        (SETTINGS, JSON),
        (
            "fedfrozen methods",
            "fedfrozen methods strategy=fedavg,fedprox",
            "fedfrozen methods model=vit_cifar dataset.image_size=32",
        ),
    ),
    "doctor": Verb(
        "Whether this machine is fit for a run, and what to change if not.",
        (SETTINGS,),
        ("fedfrozen doctor", "fedfrozen doctor runtime=flower num_clients=20"),
    ),
    "census": Verb(
        "Check before training whether the sites' data fit together: census.json and census.html.",
        (
            SETTINGS,
            word(
                "--floor",
                type=int,
                default=10,
                help="smallest number of people in a published cell; sites have their own",
            ),
            word(
                "--column",
                type=name_and_values,
                action="append",
                default=[],
                metavar="NAME=EDGES|WORDS",
                help="a column to count: age=0,18,65,120 or sex=F,M; sites must name the same",
            ),
            word("--epsilon", type=float, help="noise on every count, from each site's privacy budget"),
            word(
                "--matches",
                action="store_true",
                help="rows that sites share, by keyed hashes; not with --epsilon",
            ),
            word("--view", help="of the sites' data"),
        ),
        (
            "fedfrozen census",
            "fedfrozen census dataset=text dataset.path=notes.csv partition=natural --column age=0,18,65,120",
            "fedfrozen census runtime=deployed runtime.server_kit=kits/operator output_dir=census",
        ),
        "Nothing is trained. Each site counts its own rows and reports what its policy allows; cells of few "
        "people are hidden, and others with them, so that no one can derive them.",
    ),
    "survival": Verb(
        "Survival curves, log-rank test and Cox regression from the sites' sums: survival.html.",
        (
            word(
                "words",
                metavar="FILE|KEY=VALUE",
                nargs="*",
                help="a table whose sites are simulated; settings",
            ),
            word("--time", required=True, metavar="COLUMN", help="how long each person was followed"),
            word(
                "--event", required=True, metavar="COLUMN", help="1 where the event ended that, 0 where not"
            ),
            word("--group", metavar="COLUMN[=A,B]", help="curves by its values, and the log-rank test"),
            word("--covariates", default="", metavar="A,B", help="columns of numbers, for a Cox regression"),
            word("--site", metavar="COLUMN", help="of FILE: whose site a row is of"),
            word(
                "--every", type=float, metavar="STEP", help="count between edges so far apart; needs --until"
            ),
            word(
                "--until", type=float, metavar="TIME", help="the last edge: longer times are censored there"
            ),
            word("--edges", metavar="FILE", help="a file with the edges, in place of --every"),
            word("--ties", default="efron", choices=("efron", "breslow"), help="Cox: events at one time"),
            word("--by-site", action="store_true", help="Cox: each site has its own baseline (stratified)"),
            word("--epsilon", type=float, help="noise on every count; curves alone, between edges"),
            word(
                "--floor",
                type=int,
                default=10,
                help="smallest number of people in a count; sites have their own",
            ),
            word("--view", help="of the sites' data"),
        ),
        (
            "fedfrozen survival patients.csv --time days --event died --group arm --site hospital",
            "fedfrozen survival patients.csv --time days --event died --covariates age --every 9 --until 90",
            "fedfrozen survival runtime=deployed runtime.server_kit=kits/operator --time days --event died",
        ),
        "Nothing is trained and no row leaves a site. Without edges the times are exact, which a "
        "real site's policy must allow.",
    ),
    "audit": Verb(
        "Attack a finished run: who was in it, and whether its epsilon holds. Exits 1 if one does not.",
        (
            word("run", metavar="RUN", help="the folder of a run, or a site's own privacy folder"),
            TRUSTED,
            word(
                "overrides",
                metavar="KEY=VALUE",
                nargs="*",
                help="client, rows, shadow_pairs, shadow_epochs, seed",
            ),
        ),
        ("fedfrozen audit outputs/RUN", "fedfrozen audit outputs/RUN rows=200 shadow_pairs=1"),
    ),
}
