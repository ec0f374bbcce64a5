"""`fedfrozen provision`: keys and certificates of a federation."""

from pathlib import Path

from fedfrozen_app.core.verbs.verb import Verb, word

KITS = (
    word("-o", "--output", type=Path, required=True, help="folder for the kits"),
    word("--passphrase-file", type=Path, help="holds the authority's passphrase"),
)
FEDERATION = word("federation", type=Path, help="YAML file: server: {address, port}, sites: [names]")

PROVISION_VERBS: dict[str, Verb] = {
    "try-sites": Verb(
        "A server and two sites on this machine: kits, an approval, three rounds, the sites' logs.",
        (
            word("folder", metavar="FOLDER", type=Path, nargs="?", help="keep everything in this new folder"),
            word("--yes", action="store_true", help="approve the run without asking"),
            word("--port", type=int, metavar="N", help="of the server (default: any that is free)"),
        ),
        ("fedfrozen try-sites", "fedfrozen try-sites trial --yes"),
        "It shows every command before it carries it out, and stops all that it started. The data are "
        "pictures of digits. Without nginx it says what is left out.",
    ),
    "provision": Verb(
        "Certificates and a start-up kit for every party of a federation.",
        (
            FEDERATION,
            *KITS,
            word("--renew", metavar="PARTY", help="a party or 'all': make a new key and certificate"),
        ),
        (
            "fedfrozen provision init federation.yaml -o kits      # the authority; keep it off-line",
            "fedfrozen provision sign north.csr federation.yaml -o kits",
            "fedfrozen provision rotate -o kits",
            "fedfrozen provision federation.yaml -o kits           # all at once, to try it",
        ),
        "Without init, sign or rotate it makes every party's key here, so do not use it for real "
        "sites. Run again, it keeps what exists and adds what is missing.",
    ),
    "provision init": Verb(
        "The authority of a federation, under a passphrase.",
        (FEDERATION, *KITS),
        ("fedfrozen provision init federation.yaml -o kits",),
    ),
    "provision sign": Verb(
        "The kit for the party that made the request; it holds no key.",
        (
            word("request", type=Path, help="the .csr that `fedfrozen site request` made"),
            FEDERATION,
            *KITS,
            word("--fingerprint", help="of the key, which the party gave you by another way"),
        ),
        ("fedfrozen provision sign north.csr federation.yaml -o kits",),
    ),
    "provision rotate": Verb(
        "Change to a new authority; for a time both are accepted.",
        (
            *KITS,
            word("--finish", action="store_true", help="the old authority is no longer accepted"),
            word("--anyway", action="store_true", help="finish although some parties are not renewed"),
        ),
        ("fedfrozen provision rotate -o kits", "fedfrozen provision rotate -o kits --finish"),
    ),
}
