"""Every verb of the command: its purpose, arguments and examples.

Declared separately from the code that does the work, so that `fedfrozen VERB --help` imports nothing heavy.
"""

import argparse
import textwrap

from fedfrozen_app.core.arguments import Arguments
from fedfrozen_app.core.verbs.check_verbs import CHECK_VERBS
from fedfrozen_app.core.verbs.inspect_verbs import INSPECT_VERBS
from fedfrozen_app.core.verbs.provision_verbs import PROVISION_VERBS
from fedfrozen_app.core.verbs.research_verbs import RESEARCH_VERBS
from fedfrozen_app.core.verbs.site_verbs import SITE_VERBS
from fedfrozen_app.core.verbs.sweep_verbs import SWEEP_VERBS
from fedfrozen_app.core.verbs.train_verbs import TRAIN_VERBS
from fedfrozen_app.core.verbs.verb import Verb

# The headings of `fedfrozen --help`, and the verbs under each, in this order.
GROUPS: dict[str, tuple[str, ...]] = {
    "train": tuple(TRAIN_VERBS),
    "sweep": tuple(SWEEP_VERBS),
    "inspect": tuple(INSPECT_VERBS),
    "check": tuple(CHECK_VERBS),
    "sites": ("try-sites", "provision", "site", "server"),  # each has subcommands: "site check"
    "research": ("theory", "align"),
    "shell": ("completion",),
}
VERBS: dict[str, Verb] = {
    **TRAIN_VERBS,
    **SWEEP_VERBS,
    **INSPECT_VERBS,
    **CHECK_VERBS,
    **PROVISION_VERBS,
    **SITE_VERBS,
    **RESEARCH_VERBS,
}


def parser(verb: str) -> Arguments:
    """The parser of a verb, or of a subcommand: "site check"."""
    about = VERBS[verb]
    below = [name for name in VERBS if name.startswith(f"{verb} ")]
    listed = [f"  {name:{max(map(len, below))}}  {VERBS[name].summary}" for name in below]
    examples = [f"  {line}" for line in about.examples]
    found = Arguments(
        prog=f"fedfrozen {verb}",
        description="\n\n".join(filter(None, (about.summary, textwrap.fill(about.more, 100)))),
        epilog="\n".join([*(["words:", *listed, ""] if listed else ()), "examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for names, options in about.words:
        found.add_argument(*names, **options)
    return found


def parse(verb: str, words: list[str]) -> argparse.Namespace:
    """Settings and options in any order: argparse alone takes the settings before the first option only."""
    return parser(verb).parse_intermixed_args(words)


def asked_for_help(words: list[str]) -> str | None:
    """The verb whose help a command line asks for: the longest one known; None where it asks for none."""
    if not {"-h", "--help"} & set(words) or not words or words[0] not in VERBS:
        return None
    longer = " ".join(words[:2])
    return longer if longer in VERBS else words[0]
