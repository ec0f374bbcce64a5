"""Federated training of Transformers from Python: `import fedfrozen`, then `fedfrozen.run(...)`.

A single module, so that the packages of this distribution stay those of its layout. What it offers lies in
`fedfrozen_app.api`, and is imported when it is first asked for: torch takes seconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedfrozen_app.api.calls import compare, load, run, sweep
    from fedfrozen_app.api.results import Comparison, Run, Sweep
    from fedfrozen_app.config import setting
    from fedfrozen_app.errors import RunFailed, UserError
    from fedfrozen_app.exchange.plan import Plan
    from fedfrozen_app.server.base import PlannedFedAvg as Strategy

_PLACES = {
    "run": "fedfrozen_app.api.calls:run",
    "sweep": "fedfrozen_app.api.calls:sweep",
    "load": "fedfrozen_app.api.calls:load",
    "compare": "fedfrozen_app.api.calls:compare",
    "Run": "fedfrozen_app.api.results:Run",
    "Sweep": "fedfrozen_app.api.results:Sweep",
    "Comparison": "fedfrozen_app.api.results:Comparison",
    "Strategy": "fedfrozen_app.server.base:PlannedFedAvg",
    "Plan": "fedfrozen_app.exchange.plan:Plan",
    "setting": "fedfrozen_app.config:setting",
    "UserError": "fedfrozen_app.errors:UserError",
    "RunFailed": "fedfrozen_app.errors:RunFailed",
}
__all__ = [
    "Comparison",
    "Plan",
    "Run",
    "RunFailed",
    "Strategy",
    "Sweep",
    "UserError",
    "compare",
    "load",
    "run",
    "setting",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fedfrozen' has no attribute {name!r}: it offers {', '.join(__all__)}")
    module, _, attribute = _PLACES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
