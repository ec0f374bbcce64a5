"""Which orders and models differential privacy covers: those of which all that a client learns is clipped and
noised. And where its noise goes. Without Opacus, which takes long to load."""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from fedfrozen_app.config import Config
from fedfrozen_app.exchange.order import Order

if TYPE_CHECKING:
    from torch import nn


def noise_in_sum(config: Config) -> bool:
    """Whether the noise is added to what is masked, in shares, and not to each client's steps."""
    secure = config.secure_aggregation
    return config.privacy.name != "none" and secure.name == "on" and secure.noise == "sum"


def cannot_cover(order: Order) -> str | None:
    """Why privacy=dp_sgd cannot cover this order, as a whole sentence; None when it can."""
    if order.plan.private:
        return (
            "privacy=dp_sgd covers what all clients share, but this strategy keeps parts of the model on "
            "the client: choose another strategy, or privacy=none."
        )
    if order.method.has_arrays():
        return (
            f"privacy=dp_sgd covers what is trained and sent, but the algorithm {order.algorithm} keeps "
            "or sends arrays of its own, which nobody clips: choose another strategy, or privacy=none."
        )
    if not order.method.adds_nothing():
        return (
            f"privacy=dp_sgd covers what is trained, but the algorithm {order.algorithm} sends something "
            "else in its place: choose another strategy, or privacy=none."
        )
    if len(order.plan.steps) > 1:
        return "privacy=dp_sgd knows no rounds in phases: choose another strategy, or privacy=none."
    return None


_changes_by_reading: WeakKeyDictionary["nn.Module", bool] = WeakKeyDictionary()


def cannot_cover_model(model: "nn.Module") -> str | None:
    """The same of a model, whatever trains."""
    if model not in _changes_by_reading:  # once: every client asks in every round
        limits = (getattr(module, "max_norm", None) for module in model.modules())
        _changes_by_reading[model] = any(limit is not None for limit in limits)
    if _changes_by_reading[model]:
        return (
            "privacy=dp_sgd cannot cover an embedding with max_norm, which changes its own rows by what it "
            "reads: build the model without max_norm."
        )
    return None
