"""Verbs that train a model or use a trained one."""

from pathlib import Path

from fedfrozen_app.core.verbs.verb import RUN, TRUSTED, Verb, word

DETACH, STOP = "--detach", "--stop"

TRAIN_VERBS: dict[str, Verb] = {
    "resume": Verb(
        "Continue a run after its newest checkpoint, in the same folder.",
        (
            RUN,
            word("overrides", metavar="KEY=VALUE", nargs="*", help="settings that change from now on"),
            word(DETACH, action="store_true", help="a deployed run: exit once it is submitted"),
            word(STOP, action="store_true", help="a deployed run: stop it first, if it still runs"),
            TRUSTED,
        ),
        ("fedfrozen resume outputs/RUN", "fedfrozen resume outputs/RUN num_rounds=80"),
    ),
    "attach": Verb(
        "Watch a running deployed run, or stop it.",
        (
            RUN,
            word(
                "--on-interrupt",
                choices=("detach", "stop"),
                default="detach",
                help="what Ctrl-C does: leave it running (the default), or stop it",
            ),
            word(STOP, action="store_true", help="stop the run now and write its report"),
            TRUSTED,
        ),
        ("fedfrozen attach outputs/RUN",),
    ),
    "evaluate": Verb(
        "Evaluate the final model of a run on its test set; prints one line of JSON.",
        (
            RUN,
            word("overrides", metavar="KEY=VALUE", nargs="*", help="such as another dataset.path"),
            TRUSTED,
        ),
        ("fedfrozen evaluate outputs/RUN",),
    ),
    "export": Verb(
        "Write the final model as a folder for transformers' from_pretrained; adapters for peft's.",
        (
            RUN,
            word("folder", metavar="DIR", help="the folder to write"),
            word(
                "--merge",
                action="store_true",
                help="adapters: merge them into the weights",
            ),
            TRUSTED,
        ),
        ("fedfrozen export outputs/RUN my-model",),
    ),
    "calibrate": Verb(
        "Temperature, and prediction sets of a stated coverage, from rows that training never saw.",
        (
            RUN,
            word("--coverage", type=float, default=0.9, metavar="SHARE", help="default: 0.9"),
            word("--epsilon", type=float, metavar="E", help="with noise of this epsilon for each unit"),
            word(
                "--rows",
                choices=("clients", "server"),
                help="whose held-out rows; default: the clients', where counts of them may be asked for",
            ),
            TRUSTED,
        ),
        ("fedfrozen calibrate outputs/RUN", "fedfrozen calibrate outputs/RUN --coverage 0.95 --rows server"),
        "Writes calibration.json; report, fairness and export use it.",
    ),
    "forget": Verb(
        "Take a client out of a finished run: its rounds since that client's first, again, without it.",
        (
            RUN,
            word("--client", metavar="NAME", help="a client's number, or a site's name"),
            word("--request", type=Path, metavar="FILE", help="instead: what `fedfrozen site leave` wrote"),
            word("--out", type=Path, metavar="DIR", help="the new run's folder; default: RUN-without-NAME"),
            word("--dry-run", action="store_true", help="say what it would cost, and stop"),
            word("--from-start", action="store_true", help="run all rounds again, without a checkpoint"),
            word("--key", type=Path, metavar="FILE", help="sign the statement with this private key (PEM)"),
            TRUSTED,
        ),
        ("fedfrozen forget outputs/RUN --client 3 --dry-run", "fedfrozen forget outputs/RUN --client 3"),
        "The new model is, to the bit, that of a run which the client never joined after that checkpoint. "
        "forget.json says what was run again. checkpoint.rollback=true keeps the checkpoints that it needs.",
    ),
}
