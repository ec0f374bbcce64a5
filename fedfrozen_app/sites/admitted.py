"""The parties that the server admits: the certificates in `admitted/`, and the list that its proxy reads.

The proxy admits a certificate of the federation's authority whose serial number is on this list. A renewed or
revoked certificate is therefore out at once.
"""

from pathlib import Path

from cryptography import x509

from fedfrozen_app.core.certificates import problem_of, read_certificate, read_trusted, serial, who
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites.files import PUBLIC, write
from fedfrozen_app.sites.request import NAME

LIST = "admitted.conf"


def admit(server: Path, pem: bytes) -> tuple[str, str]:
    """Add a certificate, replacing an earlier one of that name. Returns (name, role)."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise UserError(f"That is no certificate ({error}): have it sent again.") from error
    if problem := problem_of(certificate, read_trusted(server / "ca.crt")):
        raise UserError(f"{certificate.subject.rfc4514_string()} is not admitted: {problem}.")
    name, role = who(certificate.subject)
    if role == "server" or not NAME.fullmatch(name):  # used as a file name and in nginx's map
        raise UserError(f"{name!r} is no site and no operator: it is not admitted.")
    write(server / "admitted" / f"{name}.crt", pem, PUBLIC)
    write_list(server)
    return name, role


def admitted(server: Path) -> dict[str, x509.Certificate]:
    return {path.stem: read_certificate(path) for path in sorted((server / "admitted").glob("*.crt"))}


def write_list(server: Path) -> None:
    lines = []
    for name, certificate in admitted(server).items():
        lines.append(f'"{serial(certificate)}" "{who(certificate.subject)[1]} {name}";\n')
    write(server / LIST, "".join(lines).encode(), PUBLIC)
