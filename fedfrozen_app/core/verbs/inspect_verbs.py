"""Verbs that show the results of runs."""

from fedfrozen_app.core.verbs.verb import RUN, TRUSTED, Verb, word

FOLDER = word("folder", metavar="DIR", help="the folder of a run, or one that holds runs")

INSPECT_VERBS: dict[str, Verb] = {
    "list": Verb(
        "List the runs there are, with their results.",
        (word("folders", metavar="DIR", nargs="*", help="where to look; default: outputs"),),
        ("fedfrozen list", "fedfrozen list outputs/sweeps"),
    ),
    "show": Verb(
        "One run: its metrics, its state, its settings, the command to repeat it.",
        (RUN,),
        ("fedfrozen show outputs/RUN",),
    ),
    "verify": Verb(
        "Check every file of a run or a sweep: what is whole, damaged or missing. Exits 1 if something is.",
        (
            word("folder", metavar="RUN|SWEEP", help="the folder of a run or of a sweep"),
            word(
                "--repair",
                action="store_true",
                help="rebuild what can be: report, curves, comparison, summary, status, the final model",
            ),
        ),
        ("fedfrozen verify outputs/RUN", "fedfrozen verify outputs/sweeps/NAME --repair"),
    ),
    "watch": Verb(
        "Serve the live page of a run or sweep, on this machine only.",
        (FOLDER, word("--port", type=int, default=8765, help="default: 8765; 0: any that is free")),
        ("fedfrozen watch outputs/RUN", "fedfrozen watch outputs/sweeps/NAME --port 0"),
    ),
    "report": Verb(
        "Write the page of a run or a sweep, finished or not.",
        (FOLDER,),
        ("fedfrozen report outputs/RUN",),
    ),
    "personal": Verb(
        "How every client of one or more runs does on its own test rows, from worst to best.",
        (
            word("runs", metavar="RUN", nargs="+", help="folders of runs that wrote personal.json"),
            word("png", metavar="png=FILE", nargs="?", help="where the picture goes; default: the first RUN"),
        ),
        ("fedfrozen personal first second png=both.png",),
    ),
    "baselines": Verb(
        "What plain models, and the run's own model without a federation, have on the same rows.",
        (
            RUN,
            word("--plain", action="store_true", help="plain models alone, which takes seconds"),
            TRUSTED,
        ),
        ("fedfrozen baselines outputs/RUN", "fedfrozen baselines outputs/RUN --plain"),
        "Plain models are scikit-learn's, with its own settings, on the rows of all clients in one place. "
        "The run's own model trains on these rows too, and at each client alone (at most 20), with the run's "
        "first weights, rounds, rates, and local epochs or steps. All are measured on the run's test rows. "
        "Writes baselines.json into the folder of the run, and its report again.",
    ),
    "fairness": Verb(
        "For whom a model fails: by site, by class and by subgroup, worst first, with intervals.",
        (
            word("runs", metavar="RUN", nargs="+", help="folders of finished runs"),
            TRUSTED,
            word(
                "--by", action="append", default=[], metavar="COLUMN", help="evaluate again, by this column"
            ),
            word(
                "--bootstrap",
                type=int,
                default=0,
                metavar="N",
                help="evaluate again, with N bootstrap draws of people",
            ),
        ),
        (
            "fedfrozen fairness outputs/RUN",
            "fedfrozen fairness outputs/RUN outputs/LOCAL --by sex --by age_band --bootstrap 200",
        ),
    ),
}
