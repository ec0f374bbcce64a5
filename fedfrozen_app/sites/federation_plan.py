"""`FEDERATION.yaml`: the server, the sites and the operators of a federation."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography import x509

from fedfrozen_app.core.certificates import general_name
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites.authority import DAYS
from fedfrozen_app.sites.kit import port_number, read_yaml
from fedfrozen_app.sites.request import NAME

RESERVED = ("server", "authority", "all")


@dataclass(frozen=True)
class Site:
    name: str
    data: dict[str, Any] = field(default_factory=lambda: {"kind": "images", "path": "data"})


@dataclass(frozen=True)
class Party:
    """The server, as the sites reach it, and the port on which its own processes meet behind the proxy."""

    address: str
    port: int
    internal_port: int = 8000
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class FederationPlan:
    server: Party
    sites: tuple[Site, ...]
    operators: tuple[str, ...] = ("operator",)
    valid_days: int = 397

    def role(self, name: str) -> str | None:
        if name == "server":
            return "server"
        if name in self.operators:
            return "operator"
        return "site" if any(site.name == name for site in self.sites) else None

    def parties(self) -> list[str]:
        return ["server", *(site.name for site in self.sites), *self.operators]


def read_federation(path: Path) -> FederationPlan:
    found = read_yaml(path)
    server = found.get("server")
    names = found.get("sites")
    if not isinstance(server, dict) or not {"address", "port"} <= set(server):
        raise UserError(f"{path} must say where the server is: server: {{address: HOST, port: NUMBER}}.")
    if not isinstance(names, list) or not names:
        raise UserError(f"{path} must name the sites: sites: [north, south].")
    unknown = sorted({str(key) for key in found} - {"server", "sites", "operators", "valid_days"})
    unknown += sorted({str(key) for key in server} - {"address", "port", "internal_port", "names"})
    if unknown:
        raise UserError(f"{path} holds the unknown key {unknown[0]}: remove it.")
    more = server.get("names", [])
    if not isinstance(more, list) or not all(_is_host(name) for name in more):
        raise UserError("server.names must be a list of host names and addresses: [fed.example.org].")
    party = Party(
        address=str(server["address"]),
        port=port_number(server["port"], "server.port"),
        internal_port=port_number(server.get("internal_port", 8000), "server.internal_port"),
        names=tuple(more),
    )
    if not _is_host(party.address):
        raise UserError(f"server.address={party.address} is no host name and no address: write one.")
    if party.port == party.internal_port:
        raise UserError(
            f"server.port and server.internal_port are both {party.port}: the proxy and the SuperLink "
            "behind it need one each."
        )
    sites = tuple(_site(entry) for entry in names)
    double = {site.name for site in sites if [other.name for other in sites].count(site.name) > 1}
    if double:
        raise UserError(f"The site {sorted(double)[0]} is named twice in {path}: give each its own name.")
    operators = found.get("operators", ["operator"])
    if not isinstance(operators, list) or not all(
        isinstance(n, str) and NAME.fullmatch(n) for n in operators
    ):
        raise UserError(f"{path}: operators must be a list of names: [ana, ben].")
    if taken := {site.name for site in sites} & set(operators) | set(RESERVED) & set(operators):
        raise UserError(f"The operator {sorted(taken)[0]} has the name of another party: take another.")
    days = found.get("valid_days", 397)
    if not isinstance(days, int) or not 1 <= days <= DAYS:
        raise UserError(f"valid_days={days} must be a number of days from 1 to {DAYS}.")
    return FederationPlan(party, sites, tuple(operators), days)


def _is_host(name: Any) -> bool:
    """A host name or an IP address; only the latter may contain colons."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9.:-]{1,253}", name):
        return False
    return ":" not in name or isinstance(general_name(name), x509.IPAddress)


def _site(entry: Any) -> Site:
    settings = entry if isinstance(entry, dict) else {"name": entry}
    name = settings.get("name")
    # It is also a file name, a node's name in Flower and a word in scripts.
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in RESERVED:
        raise UserError(
            f"The site name {name!r} cannot be used: take small letters, digits, - and _, "
            f"and none of {', '.join(RESERVED)}."
        )
    if unknown := sorted(set(settings) - {"name", "data"}):
        raise UserError(f"The site {name} has the unknown key {unknown[0]}: use name, data.")
    site = Site(name)
    data = settings.get("data", site.data)
    if not isinstance(data, dict):
        raise UserError(f"The site {name} must say the kind and the path of the data: {{kind, path}}.")
    return replace(site, data=data)
