"""FedProx's client: Li et al., Federated Optimization in Heterogeneous Networks, 2020."""

import torch
from torch import Tensor

from fedfrozen_app.models.task import Batch, Parameters, Task


def loss(parameters: Parameters, batch: Batch, task: Task, anchor: Parameters, mu: float) -> Tensor:
    """hᵢ(w) = fᵢ(w) + (μ/2)‖w − w_t‖², over the trained names: frozen ones cannot move."""
    return task.loss(parameters, batch) + mu / 2 * squared_distance(parameters, anchor)


def squared_distance(parameters: Parameters, anchor: Parameters) -> Tensor:
    return torch.stack([(parameters[name] - anchor[name]).square().sum() for name in anchor]).sum()
