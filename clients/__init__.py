"""Client side: one file an algorithm, stating only its difference.

An algorithm is a pure function `loss(parameters, batch, task, anchor, **settings)`: parameters and batch in,
loss out. `anchor` holds the trained names as the round began. Runners do the rest.
"""

from collections.abc import Callable

from torch import Tensor

from clients import fedavg, fedprox

Algorithm = Callable[..., Tensor]
ALGORITHMS: dict[str, Algorithm] = {"fedavg": fedavg.loss, "fedprox": fedprox.loss}
