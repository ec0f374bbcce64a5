"""A checkpoint's state besides the model, each array under the name of its owner."""

from dataclasses import asdict

from torch import Tensor

from fedfrozen_app.config import Config
from fedfrozen_app.exchange.names import by_namespace, flattened
from fedfrozen_app.files.checkpoint import Checkpoint, by_owner, with_owners
from fedfrozen_app.server.base import PlannedFedAvg


def arrays_to_keep(strategy: PlannedFedAvg) -> dict[str, Tensor]:
    connection = strategy.federation.connection
    pacing, broadcast = connection.pacing, connection.broadcast
    held = {*strategy.digests.values(), *connection.foundation.digests} if pacing is not None else ()
    return with_owners(
        pacing={} if pacing is None else pacing.arrays(held),
        strategy=strategy.state(),
        server_optimizer=strategy.optimizer.state(),
        broadcast={} if broadcast.coder is None else broadcast.state(strategy.digests),
        carried=flattened(strategy.server_state),  # the key in the checkpoint format
    )


def restore(strategy: PlannedFedAvg, start: Checkpoint, config: Config) -> None:
    """Restore the state. A run with another strategy or server optimiser than the checkpoint's
    ignores theirs."""
    device = next(iter(strategy.model.values())).device
    arrays = by_owner({name: value.to(device) for name, value in start.strategy.items()})
    if start.config["strategy"]["name"] == config.strategy["name"]:
        strategy.load_state(arrays["strategy"])
        strategy.server_state = by_namespace(arrays["carried"])
    if start.config.get("server_optimizer", {}).get("name") == config.server_optimizer["name"]:
        strategy.optimizer.load_state(arrays["server_optimizer"])
    if start.config.get("codec", {}) | {"name": ""} == asdict(config.codec) | {"name": ""}:
        strategy.federation.connection.broadcast.load_state(arrays["broadcast"])
    if (pacing := strategy.federation.connection.pacing) is not None:
        excluded = strategy.federation.connection.membership.excluded
        pacing.load(start.hooks.get("pacing", {}), arrays["pacing"], excluded)
    strategy.median_norm = start.row.get("usual_norm")
    if config.secure_aggregation.renews:  # a fork without a rule uses the configured bound
        strategy.federation.sums.clip = start.row.get("secure", {}).get("next_clip")
