"""Verbs that train a model or use a trained one."""

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
}
