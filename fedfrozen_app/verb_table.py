"""Every verb of the command: what it is for, the words it takes, examples.

Declared here, away from the code that does the work, so that `fedfrozen VERB --help` imports nothing heavy.
"""

import argparse
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfrozen_app.arguments import Arguments

Declared = tuple[tuple[str, ...], Mapping[str, Any]]  # what `add_argument` is given


@dataclass(frozen=True)
class Verb:
    says: str
    words: tuple[Declared, ...] = ()
    examples: tuple[str, ...] = ()
    more: str = ""  # a paragraph below what it says


def word(*names: str, **options: Any) -> Declared:
    return names, options


KIT = word("kit", type=Path, nargs="?", default=Path(), help="the site's kit (default: here)")
UNGUARDED = word("--unguarded", action="store_true", help="without the watchdog")
SERVER_KIT = word("kit", type=Path, help="the server's kit")
HASH = word("hash", help="of the proposal, or its first characters")
RUN = word("run", metavar="RUN", help="the folder of a run's results")
FOLDER = word("folder", metavar="DIR", help="the folder of a run, or one that holds runs")
SETTINGS = word("overrides", metavar="KEY=VALUE", nargs="*", help="settings, as for training")
JSON = word("--json", action="store_true", help="for scripts")
KITS = (
    word("-o", "--output", type=Path, required=True, help="folder for the kits"),
    word("--passphrase-file", type=Path, help="holds the authority's passphrase"),
)
FEDERATION = word("federation", type=Path, help="YAML file: server: {address, port}, sites: [names]")

# In the order, and under the headings, of `fedfrozen --help`.
GROUPS: dict[str, tuple[str, ...]] = {
    "train": ("resume", "attach", "evaluate", "export"),
    "sweep": ("search", "compare"),
    "look": ("list", "show", "watch", "report", "personal", "fairness"),
    "judge": ("plan", "methods", "doctor", "census", "audit"),
    "sites": ("provision", "site", "server"),
    "research": ("theory", "align"),
    "shell": ("completion",),
}

VERBS: dict[str, Verb] = {
    "resume": Verb(
        "Go on after the newest checkpoint of a run, in the same folder.",
        (
            RUN,
            word("overrides", metavar="KEY=VALUE", nargs="*", help="settings that change from here on"),
            word("--detach", action="store_true", help="a deployed run: leave once it is handed in"),
            word("--stop", action="store_true", help="a deployed run: stop what still goes of it first"),
        ),
        ("fedfrozen resume outputs/RUN", "fedfrozen resume outputs/RUN num_rounds=80"),
    ),
    "attach": Verb(
        "Watch a deployed run that is going, or stop it.",
        (
            RUN,
            word(
                "--on-interrupt",
                choices=("detach", "stop"),
                default="detach",
                help="what Ctrl-C does: leave the run going (the default), or stop it",
            ),
            word("--stop", action="store_true", help="stop the run now, with a whole report"),
        ),
        ("fedfrozen attach outputs/RUN",),
    ),
    "evaluate": Verb(
        "Judge the final model of a run on its test set; prints one line of JSON.",
        (RUN, word("overrides", metavar="KEY=VALUE", nargs="*", help="such as another dataset.path")),
        ("fedfrozen evaluate outputs/RUN",),
    ),
    "export": Verb(
        "Write the final model as a folder for transformers' from_pretrained; of adapters, for peft's.",
        (
            RUN,
            word("folder", metavar="DIR", help="where to"),
            word("--merge", action="store_true", help="adapters: one plain model with them in its weights"),
        ),
        ("fedfrozen export outputs/RUN my-model",),
    ),
    "search": Verb(
        "Search settings with Optuna: ranges in place of values, one run a trial.",
        (
            word("--trials", type=int, default=20, help="how many runs; default: 20"),
            word("--jobs", type=int, default=1, help="how many at once; default: 1"),
            word("--seed", type=int, default=0, help="of the sampler, not of the runs; default: 0"),
            word(
                "overrides",
                metavar="KEY=VALUE",
                nargs="*",
                help="settings; what is searched as a range or a choice",
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
    "list": Verb(
        "Which runs there are, with their results.",
        (word("folders", metavar="DIR", nargs="*", help="where to look; default: outputs"),),
        ("fedfrozen list", "fedfrozen list outputs/sweeps"),
    ),
    "show": Verb(
        "One run: its figures, its state, what it was asked for, the command to repeat it.",
        (RUN,),
        ("fedfrozen show outputs/RUN",),
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
    "fairness": Verb(
        "For whom a model fails: by site, by class and by subgroup, worst first, with intervals.",
        (
            word("runs", metavar="RUN", nargs="+", help="folders of finished runs"),
            word("--by", action="append", default=[], metavar="COLUMN", help="judge anew, by this column"),
            word("--bootstrap", type=int, default=0, metavar="N", help="judge anew, with N draws of people"),
        ),
        (
            "fedfrozen fairness outputs/RUN",
            "fedfrozen fairness outputs/RUN outputs/LOCAL --by sex --by age_band --bootstrap 200",
        ),
    ),
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
        ("fedfrozen methods", "fedfrozen methods model=vit_cifar dataset.image_size=32"),
    ),
    "doctor": Verb(
        "Whether this machine is fit for a run, and what to change if not.",
        (SETTINGS,),
        ("fedfrozen doctor", "fedfrozen doctor runtime=flower num_clients=20"),
    ),
    "census": Verb(
        "Whether the sites' data fit together, before anything is trained: census.json and census.html.",
        (
            SETTINGS,
            word("--floor", type=int, default=10, help="people in a cell that is told; sites have their own"),
            word(
                "--column",
                action="append",
                default=[],
                metavar="NAME=EDGES|WORDS",
                help="a column to count: age=0,18,65,120 or sex=F,M; sites must name the same",
            ),
            word("--epsilon", type=float, help="noise on every count, from each site's privacy budget"),
            word("--matches", action="store_true", help="rows that sites share, by keyed hashes"),
            word("--view", help="of the sites' data"),
        ),
        (
            "fedfrozen census",
            "fedfrozen census dataset=text dataset.path=notes.csv partition=natural --column age=0,18,65,120",
            "fedfrozen census runtime=deployed runtime.server_kit=kits/operator output_dir=census",
        ),
        "Nothing is trained. Each site counts its own rows and tells what its policy allows; cells of few "
        "people are hidden, and others with them, so that they cannot be worked out.",
    ),
    "audit": Verb(
        "Attack a finished run: who was in it, and whether its epsilon holds. Exits 1 if one does not.",
        (
            word("run", metavar="RUN", help="the folder of a run, or a site's own privacy folder"),
            word(
                "overrides",
                metavar="KEY=VALUE",
                nargs="*",
                help="client, rows, shadow_pairs, shadow_epochs, seed",
            ),
        ),
        ("fedfrozen audit outputs/RUN", "fedfrozen audit outputs/RUN rows=200 shadow_pairs=1"),
    ),
    "provision": Verb(
        "Certificates and a start-up kit for every party of a federation.",
        (
            FEDERATION,
            *KITS,
            word("--renew", metavar="PARTY", help="a party or 'all': make its key and certificate anew"),
        ),
        (
            "fedfrozen provision init federation.yaml -o kits      # the authority; keep it off-line",
            "fedfrozen provision sign north.csr federation.yaml -o kits",
            "fedfrozen provision rotate -o kits",
            "fedfrozen provision federation.yaml -o kits           # all at once, to try it",
        ),
        "Without init, sign or rotate it makes every party's key here, so it is no way to begin with real "
        "sites. Run again it keeps what is there and adds what is missing.",
    ),
    "provision init": Verb(
        "The authority of a federation, under a passphrase.",
        (FEDERATION, *KITS),
        ("fedfrozen provision init federation.yaml -o kits",),
    ),
    "provision sign": Verb(
        "The kit for whoever made the request; it holds no key.",
        (
            word("request", type=Path, help="the .csr that `fedfrozen site request` made"),
            FEDERATION,
            *KITS,
            word("--fingerprint", help="the key's, told by the party in another way"),
        ),
        ("fedfrozen provision sign north.csr federation.yaml -o kits",),
    ),
    "provision rotate": Verb(
        "Another authority, with a time in which both count.",
        (
            *KITS,
            word("--finish", action="store_true", help="the old authority counts no more"),
            word("--anyway", action="store_true", help="finish although some parties are not renewed"),
        ),
        ("fedfrozen provision rotate -o kits", "fedfrozen provision rotate -o kits --finish"),
    ),
    "site": Verb(
        "What a site runs in its kit.",
        (word("word", metavar="WORD", help="see below; `fedfrozen site WORD --help`"),),
        ("fedfrozen site request north", "fedfrozen site check kits/north", "fedfrozen site exec kits/north"),
    ),
    "site request": Verb(
        "A party's key, made where it stays, and a signing request for the authority.",
        (
            word("name", help="the party's name in federation.yaml"),
            word(
                "--as",
                dest="role",
                choices=("site", "server", "operator"),
                default="site",
                help="what it is (default: site)",
            ),
            word("-o", "--output", type=Path, help="folder of the kit to be (default: ./NAME)"),
        ),
        ("fedfrozen site request north", "fedfrozen site request ada --as operator"),
    ),
    "site install": Verb(
        "Put the kit that the authority sent back beside the key.",
        (
            word("received", type=Path, help="the folder that the authority sent back"),
            word("kit", type=Path, nargs="?", default=Path(), help="where the key lies (default: here)"),
            word("--authority", metavar="FINGERPRINT", help="the authority's, told by another way"),
        ),
        ("fedfrozen site install kits/north north",),
    ),
    "site renew": Verb(
        "Ask for a new certificate, with the same key or a new one.",
        (
            word("kit", type=Path, nargs="?", default=Path(), help="the kit (default: here)"),
            word("--new-key", action="store_true", help="with a new key; the old one counts till then"),
        ),
        ("fedfrozen site renew north --new-key",),
    ),
    "site check": Verb(
        "Is all in order: keys, data, policy, the way to the server?",
        (KIT,),
        ("fedfrozen site check north",),
    ),
    "site node": Verb(
        "The node that talks to the server.",
        (
            KIT,
            word("--max-retries", type=int, help="give up after so many failed calls (default: never)"),
            word(
                "--run-code-of-server",
                action="store_true",
                help="Flower's own way, without executor and policy: each message starts the code that came "
                "with it",
            ),
            UNGUARDED,
        ),
        ("fedfrozen site node north",),
    ),
    "site exec": Verb(
        "Train, as far as the policy allows, with the site's own installed package.",
        (KIT, UNGUARDED),
        ("fedfrozen site exec north",),
    ),
    "site audit": Verb(
        "What was asked, sent and refused.",
        (
            KIT,
            word(
                "--anchors",
                type=Path,
                help="anchors.jsonl of a run's folder: what the server was told of this log",
            ),
        ),
        ("fedfrozen site audit north",),
    ),
    "site pending": Verb("The runs that wait for an answer.", (KIT,), ("fedfrozen site pending north",)),
    "site show": Verb(
        "What a run asks for, in plain words.", (HASH, KIT), ("fedfrozen site show 3f9a north",)
    ),
    "site approve": Verb(
        "Let this run begin, as it is proposed.", (HASH, KIT), ("fedfrozen site approve 3f9a north",)
    ),
    "site refuse": Verb(
        "Take no part in this run, or no further.", (HASH, KIT), ("fedfrozen site refuse 3f9a north",)
    ),
    "server": Verb(
        "What runs in the server's kit.",
        (word("word", metavar="WORD", help="see below; `fedfrozen server WORD --help`"),),
        ("fedfrozen server link kits/server", "fedfrozen server admit kits/server kits/north/node.crt"),
    ),
    "server link": Verb(
        "The meeting point: Flower's SuperLink behind a proxy that asks for certificates.",
        (SERVER_KIT,),
        ("fedfrozen server link kits/server",),
    ),
    "server admit": Verb(
        "Let parties in; without a certificate, all that were before.",
        (
            SERVER_KIT,
            word("certificates", type=Path, nargs="*", help="node.crt of a site, operator.crt of a person"),
        ),
        ("fedfrozen server admit kits/server kits/north/node.crt",),
    ),
    "server revoke": Verb(
        "Let a party in no more.",
        (SERVER_KIT, word("name", help="the site or operator")),
        ("fedfrozen server revoke kits/server north",),
    ),
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
            word("out", metavar="OUT", help="where it goes"),
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


def parser(verb: str) -> Arguments:
    """The parser of a verb, or of a verb and its word: "site check"."""
    about = VERBS[verb]
    below = [name for name in VERBS if name.startswith(f"{verb} ")]
    listed = [f"  {name:{max(map(len, below))}}  {VERBS[name].says}" for name in below]
    examples = [f"  {line}" for line in about.examples]
    found = Arguments(
        prog=f"fedfrozen {verb}",
        description="\n\n".join(filter(None, (about.says, textwrap.fill(about.more, 100)))),
        epilog="\n".join([*(["words:", *listed, ""] if listed else ()), "examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for names, options in about.words:
        found.add_argument(*names, **options)
    return found


def parse(verb: str, words: list[str]) -> argparse.Namespace:
    return parser(verb).parse_args(words)


def asked_for_help(words: list[str]) -> str | None:
    """The verb whose help a command line asks for: the longest one known; None where it asks for none."""
    if not {"-h", "--help"} & set(words) or not words or words[0] not in VERBS:
        return None
    longer = " ".join(words[:2])
    return longer if longer in VERBS else words[0]
