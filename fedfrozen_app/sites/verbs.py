"""`fedfrozen site VERB` and `fedfrozen server VERB`: what runs in a kit."""

import importlib

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.sites.kit import Kit

OF_A_KIT = (
    "pending",
    "show",
    "approve",
    "refuse",
    "revoke",
    "leave",
    "audit",
    "desk",
)  # what people of a site call
WORDS = {
    "node": "fedfrozen_app.sites.guard:node",
    "exec": "fedfrozen_app.sites.guard:executor",
    "check": "fedfrozen_app.sites.site_check:main",
    "request": "fedfrozen_app.sites.request:request",
    "install": "fedfrozen_app.sites.request:install",
    "renew": "fedfrozen_app.sites.request:renew",
    "audit": "fedfrozen_app.sites.show_audit:show_audit",
    "desk": "fedfrozen_app.desk.command:desk",
    "limit": "fedfrozen_app.sites.limits:limit",
    "metrics": "fedfrozen_app.monitoring.command:site_metrics",
    "pending": "fedfrozen_app.sites.approval_verbs:pending",
    "show": "fedfrozen_app.sites.approval_verbs:show",
    "approve": "fedfrozen_app.sites.approval_verbs:approve",
    "refuse": "fedfrozen_app.sites.approval_verbs:refuse",
    "revoke": "fedfrozen_app.sites.approval_verbs:revoke",
    "leave": "fedfrozen_app.sites.leave:leave",
}


def site(arguments: list[str]) -> None:
    if arguments and arguments[0] in OF_A_KIT:  # a mistake is reported before imports that take seconds
        Kit.read(parse(f"site {arguments[0]}", arguments[1:]).kit)
    _dispatch("site", "the site", WORDS, arguments)


SERVER_WORDS = {
    "link": "fedfrozen_app.sites.server:link",
    "admit": "fedfrozen_app.sites.server:admit",
    "revoke": "fedfrozen_app.sites.server:revoke",
    "metrics": "fedfrozen_app.monitoring.command:server_metrics",
}


def server(arguments: list[str]) -> None:
    """`fedfrozen server link|admit|revoke|metrics`: what runs in the server's kit."""
    _dispatch("server", "the server", SERVER_WORDS, arguments)


def _dispatch(verb: str, who: str, words: dict[str, str], arguments: list[str]) -> None:
    if not arguments or arguments[0] not in words:
        raise UserError(f"Say what {who} shall do: fedfrozen {verb} {'|'.join(words)} [KIT].")
    module, _, function = words[arguments[0]].partition(":")
    getattr(importlib.import_module(module), function)(arguments[1:])
