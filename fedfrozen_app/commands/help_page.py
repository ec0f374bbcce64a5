"""`fedfrozen --help`, `--version` and `VERB --help`: from tables and file names, without slow imports."""

import textwrap
from importlib.metadata import PackageNotFoundError, version

from fedfrozen_app.core import conf_files
from fedfrozen_app.core.verb_table import GROUPS, VERBS, asked_for_help, parser

ABOUT = "trains Transformers across clients whose data differ and may not leave them, on Flower."
WIDTH = 100
USAGE = (
    ("fedfrozen [KEY=VALUE ...]", "train; settings change the defaults"),
    ("fedfrozen -m KEY=A,B [KEY=VALUE ...]", "a sweep: one run for each combination"),
    ("fedfrozen VERB ...", "one of the verbs below; fedfrozen VERB --help"),
)
EXAMPLES = (
    ("fedfrozen", "FedFrozen on handwritten digits, on a CPU, without a download"),
    ("fedfrozen strategy=fedprox partition.alpha=0.1 num_rounds=10", "another method, stronger skew"),
    ("fedfrozen -m strategy=fedavg,fedfrozen seed=0,1,2 output_dir=first", "six runs, compared"),
    ("fedfrozen dataset=images dataset.path=DIR", "your own pictures, in folders by class"),
    ("fedfrozen watch first", "look at them while they run"),
)
HYDRA = (
    ("--cfg job", "print what a command line resolves to, and train nothing"),
    ("--hydra-help", "more flags, of Hydra, which reads the settings"),
)


def requested_text(arguments: list[str]) -> str | None:
    """The help text that a command line requests; None if it requests work."""
    if (verb := asked_for_help(arguments)) is not None:
        return parser(verb).format_help().rstrip()
    if arguments and arguments[0] in VERBS:
        return None
    if {"-h", "--help"} & set(arguments):
        return help_page()
    if "--version" in arguments:
        return f"fedfrozen {own_version()}"
    return None


def own_version() -> str:
    try:
        return version("fedfrozen")
    except PackageNotFoundError:  # a checkout on the path, or Flower's bundle
        return "(not installed)"


def help_page() -> str:
    usual = conf_files.usual()
    lines = [f"fedfrozen {own_version()} {ABOUT}", "", *_columns(USAGE, 2)]
    for group, verbs in GROUPS.items():
        lines += ["", f"{group}:", *_columns([(verb, VERBS[verb].summary) for verb in verbs], 2)]
    lines += ["", "settings in groups (GROUP=NAME; the default comes first):"]
    for group, names in conf_files.choices().items():
        ordered = sorted(names, key=lambda name: name != usual.get(group))
        lines += textwrap.wrap(
            f"{group:20}{'  '.join(ordered)}", WIDTH, initial_indent="  ", subsequent_indent=" " * 22
        )
    lines += ["", "flags:", *_columns(HYDRA, 2), "", "examples:", *_columns(EXAMPLES, 2), ""]
    return "\n".join([*lines, "Every key: docs/configuration.md. A tutorial and all else: docs/index.md."])


def _columns(rows: tuple[tuple[str, str], ...] | list[tuple[str, str]], indent: int) -> list[str]:
    width = max(len(left) for left, _ in rows)
    return [f"{' ' * indent}{left:{width}}  {right}".rstrip() for left, right in rows]
