"""The clients' losses on a task whose gradient is known: f(w) = x·w."""

import torch

from clients.fedavg import FedAvg
from clients.fedprox import FedProx
from fedfrozen_app.local.algorithm import Start, squared_distance


class Slope:
    """A task with the constant gradient `batch`."""

    def loss(self, parameters, batch):
        return (parameters["w"] * batch).sum()


def test_fedprox_gradient_by_hand():
    w = torch.tensor([2.0, -1.0], requires_grad=True)
    frozen = torch.tensor([100.0])
    start = Start({"w": torch.tensor([1.0, 1.0]), "frozen": torch.zeros(1)}, ("w",))
    loss = FedProx(mu=0.5).loss({"w": w, "frozen": frozen}, torch.tensor([1.0, 3.0]), Slope(), start)
    # x·w = 2 − 3 = −1;  ‖w − w_t‖² = 1 + 4 = 5, times mu/2 = 0.25
    assert loss.item() == -1 + 0.25 * 5
    loss.backward()
    assert w.grad.tolist() == [1 + 0.5 * 1, 3 + 0.5 * -2]  # x + mu (w − w_t)


def test_distance_is_over_the_anchor_s_names_alone():
    parameters = {"a": torch.tensor([3.0]), "b": torch.tensor([9.0])}
    assert squared_distance(parameters, {"a": torch.tensor([1.0])}).item() == 4.0


def test_plain_client_does_not_look_at_its_start():
    w = torch.tensor([2.0])
    assert FedAvg().loss({"w": w}, torch.tensor([5.0]), Slope(), Start({}, ())).item() == 10.0
