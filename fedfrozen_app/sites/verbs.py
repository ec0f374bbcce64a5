"""`fedfrozen site WORD`: what a site runs in its kit."""

import importlib

from fedfrozen_app.errors import UserError

WORDS = {
    "exec": "fedfrozen_app.sites.executor:main",
    "check": "fedfrozen_app.sites.site_check:main",
    "audit": "fedfrozen_app.sites.site_check:audit",
    "pending": "fedfrozen_app.sites.approval:pending",
    "show": "fedfrozen_app.sites.approval:show",
    "approve": "fedfrozen_app.sites.approval:approve",
    "refuse": "fedfrozen_app.sites.approval:refuse",
}


def site(arguments: list[str]) -> None:
    if not arguments or arguments[0] not in WORDS:
        raise UserError(f"Say what the site shall do: fedfrozen site {'|'.join(WORDS)} [KIT].")
    module, _, function = WORDS[arguments[0]].partition(":")
    getattr(importlib.import_module(module), function)(arguments[1:])
