"""Federated training of Transformers from Python: `import fedfrozen`, then `fedfrozen.run(...)`.

A single module, so that the packages of this distribution stay those of its layout. What it offers lies in
`fedfrozen_app.commands.api`, and is imported when it is first asked for: torch takes seconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedfrozen_app.commands.api.calls import compare, load, resume, run, sweep
    from fedfrozen_app.commands.api.results import Comparison, Run, Sweep
    from fedfrozen_app.config import setting
    from fedfrozen_app.core.errors import RunFailed, UserError
    from fedfrozen_app.exchange.plan import Plan
    from fedfrozen_app.local.algorithm import Algorithm, squared_distance
    from fedfrozen_app.server.base import PlannedFedAvg as Strategy

_PLACES = {
    "run": "fedfrozen_app.commands.api.calls:run",
    "sweep": "fedfrozen_app.commands.api.calls:sweep",
    "resume": "fedfrozen_app.commands.api.calls:resume",
    "load": "fedfrozen_app.commands.api.calls:load",
    "compare": "fedfrozen_app.commands.api.calls:compare",
    "Run": "fedfrozen_app.commands.api.results:Run",
    "Sweep": "fedfrozen_app.commands.api.results:Sweep",
    "Comparison": "fedfrozen_app.commands.api.results:Comparison",
    "Strategy": "fedfrozen_app.server.base:PlannedFedAvg",
    "Algorithm": "fedfrozen_app.local.algorithm:Algorithm",
    "squared_distance": "fedfrozen_app.local.algorithm:squared_distance",
    "Plan": "fedfrozen_app.exchange.plan:Plan",
    "setting": "fedfrozen_app.config:setting",
    "UserError": "fedfrozen_app.core.errors:UserError",
    "RunFailed": "fedfrozen_app.core.errors:RunFailed",
}
__all__ = [
    "Algorithm",
    "Comparison",
    "Plan",
    "Run",
    "RunFailed",
    "Strategy",
    "Sweep",
    "UserError",
    "compare",
    "load",
    "resume",
    "run",
    "setting",
    "squared_distance",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'fedfrozen' has no attribute {name!r}: it offers {', '.join(__all__)}")
    module, _, attribute = _PLACES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
