"""Which train requests and models differential privacy covers: those where everything that a client learns is
clipped and noised. Also where the noise is added. Does not import Opacus, which is slow to load."""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from fedfrozen_app.config import Config
from fedfrozen_app.exchange.train_request import TrainRequest

if TYPE_CHECKING:
    from torch import nn


def noise_in_sum(config: Config) -> bool:
    """Whether the noise is added to what is masked, in shares, and not to each client's steps."""
    secure = config.secure_aggregation
    return config.privacy.name != "none" and secure.name == "on" and secure.noise == "sum"


def reason_not_covered(request: TrainRequest) -> str | None:
    """Why privacy=dp_sgd cannot cover this request, as a whole sentence; None when it can."""
    if request.plan.private:
        return (
            "privacy=dp_sgd covers what all clients share, but this strategy keeps parts of the model on "
            "the client: choose another strategy, or privacy=none."
        )
    if request.method.has_step() and not request.method.private_step:
        return (
            f"privacy=dp_sgd covers steps by noised gradients, but the algorithm {request.algorithm} takes "
            "its own, which may use more of the data: choose another strategy, or privacy=none."
        )
    if request.method.evaluates_start():
        return (
            f"privacy=dp_sgd covers noised steps, but the algorithm {request.algorithm} also reads the loss "
            "or gradient of all its rows, without noise: choose another strategy, or privacy=none."
        )
    method = request.method
    # Algorithm state that a private step replaces derives from noised gradients, and is never sent.
    noised = method.step_state if method.private_step else ()
    own = [space for space in method.client_state if space not in noised]
    if method.from_server or method.to_server or own:
        return (
            f"privacy=dp_sgd covers what is trained and sent, but the algorithm {request.algorithm} keeps "
            "or sends arrays of its own, which are not clipped: choose another strategy, or privacy=none."
        )
    if not request.method.adds_nothing():
        return (
            f"privacy=dp_sgd covers what is trained, but the algorithm {request.algorithm} sends something "
            "else in its place: choose another strategy, or privacy=none."
        )
    if len(request.plan.steps) > 1:
        return "privacy=dp_sgd knows no rounds in phases: choose another strategy, or privacy=none."
    return None


_changes_by_reading: WeakKeyDictionary["nn.Module", bool] = WeakKeyDictionary()


def reason_model_not_covered(model: "nn.Module") -> str | None:
    """Why privacy=dp_sgd cannot cover this model, whatever is trained; None when it can."""
    if model not in _changes_by_reading:  # once: every client asks in every round
        limits = (getattr(module, "max_norm", None) for module in model.modules())
        _changes_by_reading[model] = any(limit is not None for limit in limits)
    if _changes_by_reading[model]:
        return (
            "privacy=dp_sgd cannot cover an embedding with max_norm, which changes its own rows by what it "
            "reads: build the model without max_norm."
        )
    return None
