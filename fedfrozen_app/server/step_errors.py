"""Replace the traceback of a strategy's `step` that reads an unknown namespace by one sentence."""

from collections.abc import Iterable

from torch import Tensor

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.server.aggregate import Update
from fedfrozen_app.server.seams import StrategySeams


def checked_step(strategy: StrategySeams, update: Update) -> dict[str, Tensor]:
    """What `step` returns, or a `UserError` if it reads an unknown namespace."""
    try:
        return strategy.step(update)
    except KeyError as error:
        key = error.args[0] if error.args else None
        if not isinstance(key, str) or "." in key or key in strategy.model:  # a parameter name
            raise
        raise UserError(
            f"Strategy {type(strategy).__name__}: step() reads '{key}', which is no namespace there: "
            f"update.extra has {_listed(update.extra)}, server_state has {_listed(strategy.server_state)}."
        ) from error


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "nothing"
