"""`fedfrozen site` and `fedfrozen server`: what runs in a kit."""

from pathlib import Path

from fedfrozen_app.core.verbs.verb import Verb, word

KIT = word("kit", type=Path, nargs="?", default=Path(), help="the site's kit (default: here)")
UNGUARDED = word("--unguarded", action="store_true", help="without the watchdog")
SERVER_KIT = word("kit", type=Path, help="the server's kit")
REASON = word("--reason", default="", metavar="TEXT", help="why, for the site's own record")
HASH = word("hash", help="of the proposal, or its first characters: 4 or more")

SITE_VERBS: dict[str, Verb] = {
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
            word("-o", "--output", type=Path, help="folder of the new kit (default: ./NAME)"),
        ),
        ("fedfrozen site request north", "fedfrozen site request ada --as operator"),
    ),
    "site install": Verb(
        "Install the authority's kit in the folder with the key.",
        (
            word("received", type=Path, help="the folder that the authority sent back"),
            word("kit", type=Path, nargs="?", default=Path(), help="where the key lies (default: here)"),
            word("--authority", metavar="FINGERPRINT", help="of the authority, which you got by another way"),
        ),
        ("fedfrozen site install kits/north north",),
    ),
    "site renew": Verb(
        "Ask for a new certificate, with the same key or a new one.",
        (
            word("kit", type=Path, nargs="?", default=Path(), help="the kit (default: here)"),
            word("--new-key", action="store_true", help="with a new key; the old one is valid until then"),
        ),
        ("fedfrozen site renew north --new-key",),
    ),
    "site check": Verb(
        "Is all in order: keys, data, policy, the way to the server?",
        (KIT,),
        ("fedfrozen site check north",),
    ),
    "site node": Verb(
        "The node that connects to the server.",
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
                help="anchors.jsonl of a run's folder: what the server knows of this log",
            ),
        ),
        ("fedfrozen site audit north",),
    ),
    "site desk": Verb(
        "The data steward's page in a browser: what waits, approve, refuse, revoke, budget, log.",
        (
            KIT,
            word("--port", type=int, default=0, help="on 127.0.0.1 (default: any that is free)"),
            word("--texts", type=Path, metavar="FILE", help="the page's texts in another language"),
        ),
        ("fedfrozen site desk north",),
        "The page is on this machine only. Its address is good for one browser, and once.",
    ),
    "site limit": Verb(
        "Set one limit of policy.yaml; the record of decisions says who did it.",
        (
            word("key", help="such as max_epsilon, min_people, rounds_per_day, approval"),
            word("value", help="a number or a word"),
            KIT,
        ),
        ("fedfrozen site limit max_epsilon 2 north", "fedfrozen site limit approval ask north"),
    ),
    "site metrics": Verb(
        "Numbers for a Prometheus on this machine, as far as the policy's key monitoring says.",
        (KIT, word("--port", type=int, default=9471, help="on 127.0.0.1 (default: 9471; 0: any free)")),
        ("fedfrozen site metrics north",),
    ),
    "site pending": Verb("The runs that wait for approval.", (KIT,), ("fedfrozen site pending north",)),
    "site show": Verb(
        "What a run asks for, in plain words, and what the policy says of it.",
        (
            HASH,
            KIT,
            word("--count", action="store_true", help="read the data: people, and bytes that would leave"),
            word("--json", action="store_true", help="with --count: the numbers alone, for scripts"),
        ),
        ("fedfrozen site show 3f9a north", "fedfrozen site show 3f9a north --count"),
    ),
    "site approve": Verb(
        "Allow this run, as it is proposed.", (HASH, KIT), ("fedfrozen site approve 3f9a north",)
    ),
    "site refuse": Verb(
        "Take no part in this run, or no further.",
        (HASH, KIT, REASON),
        ("fedfrozen site refuse 3f9a north --reason 'noise is off'",),
    ),
    "site revoke": Verb(
        "Take an approval back: the run gets no further reply.",
        (HASH, KIT, REASON),
        ("fedfrozen site revoke 3f9a north",),
    ),
    "site leave": Verb(
        "Give a run no further reply, and ask its operators to take this site out of its model.",
        (
            word("run", metavar="RUN", help="its id, or its proposal's hash: 4 characters of it or more"),
            KIT,
            word("--reason", default="", metavar="TEXT", help="why, for the site's record and the request"),
            word("--out", type=Path, metavar="FILE", help="the signed request (default: KIT/leave-RUN.json)"),
        ),
        (
            "fedfrozen site leave trial-7 north",
            "fedfrozen site leave 3f9a north --reason 'consent withdrawn'",
        ),
        "The record of decisions says who left, and when. Send the request to the operators: with it, "
        "`fedfrozen forget` makes the model that the run would have made without this site.",
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
        "Admit parties; without a certificate, all that were admitted before.",
        (
            SERVER_KIT,
            word("certificates", type=Path, nargs="*", help="node.crt of a site, operator.crt of a person"),
        ),
        ("fedfrozen server admit kits/server kits/north/node.crt",),
    ),
    "server metrics": Verb(
        "Numbers for a Prometheus on this machine: sites, runs, rounds, disk, certificates.",
        (
            SERVER_KIT,
            word("--port", type=int, default=9470, help="on 127.0.0.1 (default: 9470; 0: any free)"),
        ),
        ("fedfrozen server metrics kits/server",),
    ),
    "server revoke": Verb(
        "Revoke a party's admission.",
        (SERVER_KIT, word("name", help="the site or operator")),
        ("fedfrozen server revoke kits/server north",),
    ),
}
