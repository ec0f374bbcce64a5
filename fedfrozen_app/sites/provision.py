"""Certificates and a start-up kit for every party of a federation.

    fedfrozen provision init FEDERATION.yaml -o KITS    the authority, under a passphrase; keep it off-line
    fedfrozen provision sign REQUEST.csr FEDERATION.yaml -o KITS
                                                        the kit for the party of the request; it holds no key
    fedfrozen provision rotate -o KITS [--finish]       another authority; both are trusted for a time

    fedfrozen provision FEDERATION.yaml -o KITS         to try it on one machine: all kits at once, with keys

The last one makes every party's key, so it is not for real sites. Run again, it keeps existing kits and adds
missing ones; `--renew PARTY` (or `all`) makes new keys and certificates.
"""

import re
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedfrozen_app.core.certificates import fingerprint, who
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.sites.authority import Authority, Passphrase
from fedfrozen_app.sites.federation_plan import FederationPlan, read_federation
from fedfrozen_app.sites.kit_writer import write_kit, write_kits
from fedfrozen_app.sites.request import certificate_file


def provision(arguments: list[str]) -> None:
    """The verb."""
    words = {"init": init, "sign": sign, "rotate": rotate}
    if arguments and arguments[0] in words:
        words[arguments[0]](arguments[1:])
    else:
        everything(arguments)


def everything(arguments: list[str]) -> None:
    """All kits at once, to try a federation on one machine."""
    options = parse("provision", arguments)
    plan = read_federation(options.federation)
    if options.renew not in (None, "all", *plan.parties()):
        raise UserError(
            f"There is no party '{options.renew}' in {options.federation}: renew one that is there."
        )
    passphrase = Passphrase(options.passphrase_file)
    made = write_kits(plan, options.output, renew=options.renew, passphrase=passphrase)
    print(f"{options.output} holds the kits; new or renewed: {', '.join(made) or 'nothing'}.")
    print(
        f"Start the server: sh {options.output / 'server' / 'start.sh'} (it needs nginx). It lets in all of "
        "these; whom you add later: fedfrozen server admit.\n"
        "This is for trying things on one machine: whoever ran it has the key of every site. With real sites "
        "each makes its own: fedfrozen provision init, then site request and provision sign."
    )


def init(arguments: list[str]) -> None:
    """Make the authority only."""
    options = parse("provision init", arguments)
    read_federation(options.federation)
    folder = options.output / "authority"
    if (folder / "ca.key").exists():
        raise UserError(f"{folder} holds an authority: `provision rotate` makes another with an overlap.")
    made = Authority.make(folder, Passphrase(options.passphrase_file).ask(new=True))
    print(f"{folder} holds the federation's authority: keep it off-line. Its fingerprint, for every party:")
    print(f"  {fingerprint(made.current.key.public_key())}")


def sign(arguments: list[str]) -> None:
    """A party's request becomes its certificate and its kit."""
    options = parse("provision sign", arguments)
    plan = read_federation(options.federation)
    name, role, public = read_request(options.request, plan)
    _compare(name, fingerprint(public), options.fingerprint)
    authority = Authority.read(options.output / "authority", Passphrase(options.passphrase_file))
    folder = options.output / name
    write_kit(plan, authority, name, public, folder, trying=False)
    print(f"{folder} is the kit of the {role} {name}. It holds no secret: send it back by any way.")
    if role == "server":
        print("The server also needs nginx, which is its only door.")
    if role != "server":
        print(
            f"Send {folder / certificate_file(role)} to the server, which admits it: fedfrozen server admit."
        )
    print("The party checks it with the authority's fingerprint, which it needs the first time:")
    print(f"  {fingerprint(authority.current.key.public_key())}")


def rotate(arguments: list[str]) -> None:
    """Another authority: begin, and finish once every party is renewed."""
    options = parse("provision rotate", arguments)
    passphrase = Passphrase(options.passphrase_file)
    authority = Authority.read(options.output / "authority", passphrase)
    if not options.finish:
        protected = b"ENCRYPTED" in (authority.folder / "ca.key").read_bytes()
        made = authority.rotate(passphrase.ask(new=True) if protected else passphrase.given())
        assert made.following is not None
        print("From now on kits trust both authorities. The next one's fingerprint:")
        print(f"  {fingerprint(made.following.key.public_key())}")
        print(
            "Renew the server first, then every site and operator (fedfrozen site renew, provision sign), "
            "then: provision rotate --finish, and the server once more."
        )
        return
    if authority.following is None:
        raise UserError("No rotation is under way: `fedfrozen provision rotate` begins one.")
    if (late := authority.unrenewed()) and not options.anyway:
        raise UserError(f"{', '.join(late)} would be shut out: renew them first, or finish with --anyway.")
    authority.finish()
    print(
        "The old authority counts no more. Renew the server now (site renew, provision sign, site install)."
    )


def _compare(name: str, found: str, expected: str | None) -> None:
    """Let a person confirm that a request is from the party it names."""
    if expected is not None:
        if re.sub(r"[^0-9a-f]", "", expected.lower()) != found.replace("-", ""):
            raise UserError(f"The request's key is {found}, and not what {name} told: do not sign it.")
        return
    if not sys.stdin.isatty():
        raise UserError(f"Ask {name} for its key's fingerprint, and if it is {found}: --fingerprint {found}.")
    print(f"The request says it is from {name}. Its key is\n  {found}")
    if input(f"Is that what {name} told you, by another way? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("Nothing was signed.")


def read_request(path: Path, plan: FederationPlan) -> tuple[str, str, ec.EllipticCurvePublicKey]:
    """(name, role, key) of a signing request that fits the federation."""
    try:
        found = x509.load_pem_x509_csr(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no signing request ({error}): have it sent again.") from error
    public = found.public_key()
    if not isinstance(public, ec.EllipticCurvePublicKey) or public.curve.name != "secp384r1":
        raise UserError(f"{path} is for another kind of key than Flower takes (EC, P-384).")
    if not found.is_signature_valid:
        raise UserError(f"{path} is not signed with its own key: whoever sent it does not hold that key.")
    name, role = who(found.subject)
    if plan.role(name) != role:
        raise UserError(f"The federation has no {role} {name}: add it to the file, or refuse the request.")
    return name, role, public
