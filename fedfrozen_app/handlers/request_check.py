"""Whether a client accepts a train request. A reason completes a sentence: "it ..."."""

from flwr.app import Context

from fedfrozen_app.config import Config
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.worker import Worker


def refusal(context: Context, config: Config, request: TrainRequest) -> str:
    """Why this client declines the request; empty if it does not."""
    secure = config.secure_aggregation
    if request.masking is None and request.trains and secure.name == "on":
        return "declines: the run is masked, and the request asks for an update without masks"
    if request.choosing and (secure.name, secure.choices, config.privacy.name) != ("on", "groups", "none"):
        return "declines: the request asks which layers it would choose, and the run does not"
    if request.evaluate and config.privacy.name != "none":
        return "declines: how a model does on its own rows is told without noise, which its epsilon excludes"
    if "max-epsilon" not in context.node_config:
        return ""
    privacy = config.privacy
    if privacy.name == "none" or privacy.seeded_noise or privacy.selection == "unaccounted":
        return (
            "declines: it takes part only with differential privacy, noise of its own, and no unaccounted "
            "choice of layers (max-epsilon)"
        )
    return ""


def incomplete(worker: Worker, request: TrainRequest) -> str:
    """Why the request is incomplete, if it is: a name it leaves out would keep an earlier message's value.
    It must not set what a client trains for itself."""
    if taken := request.private_names_in_base:
        return f"declines: the request sets {taken[0]}, which the client trains itself"
    named = {*request.base, *request.plan.private}
    unnamed = [name for name in worker.exchanged if name not in named]
    return f"declines: the request gives no start value for {unnamed[0]}" if unnamed else ""
