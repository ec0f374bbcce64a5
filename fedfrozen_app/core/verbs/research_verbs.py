"""Verbs for research, and shell completion."""

from fedfrozen_app.core.verbs.verb import Verb, word

RESEARCH_VERBS: dict[str, Verb] = {
    "theory": Verb(
        "The laboratory: why and when freezing the kernel helps, in a model small enough to solve.",
        (
            word(
                "overrides",
                metavar="KEY=VALUE",
                nargs="*",
                help="study=run|table|all|controls, heterogeneity, local_steps, ... (--cfg job lists them)",
            ),
        ),
        (
            "fedfrozen theory heterogeneity=1 warmup_rounds=auto",
            "fedfrozen theory study=table",
            "fedfrozen theory study=all",
            "fedfrozen theory study=controls",
        ),
    ),
    "align": Verb(
        "Make a dual encoder for model=checkpoint of two pretrained encoders.",
        (
            word("out", metavar="OUT", help="the folder to write"),
            word(
                "overrides",
                metavar="KEY=VALUE",
                nargs="*",
                help="vision=DIR text=DIR dataset=... dataset.align=SHARE, and text_pooling, projection_dim, "
                "train, epochs, lr, seed, domain",
            ),
        ),
        (
            "fedfrozen align dual vision=vit-base text=bert-base dataset=images dataset.path=DIR "
            "dataset.align=0.2",
        ),
    ),
    "completion": Verb(
        "A script that completes verbs, groups and keys in your shell.",
        (word("shell", choices=("bash", "zsh", "fish")),),
        ('eval "$(fedfrozen completion bash)"', "fedfrozen completion fish | source"),
    ),
}
