"""A server step that reads a namespace that is not there ends with one sentence."""

import pytest

from fedfrozen_app.core.errors import UserError
from strategies.fedavg import FedAvg
from strategies.scaffold import Scaffold
from tests.strategies.quadratics import run


class WrongExtra(Scaffold):
    def step(self, update):
        return {name: self.model[name] + value for name, value in update.extra["variates"].items()}


class WrongState(FedAvg):
    def step(self, update):
        self.server_state["c"].clear()
        return super().step(update)


class WrongName(FedAvg):
    def step(self, update):
        return {name: self.model[f"{name}.bias"] + value for name, value in update.model.items()}


def test_an_unknown_namespace_of_the_replies():
    with pytest.raises(
        UserError, match=r"WrongExtra: step\(\) reads 'variates'.*update.extra has 'dc', .* 'c'"
    ):
        run(WrongExtra, 1)


def test_server_state_that_no_algorithm_declares():
    with pytest.raises(
        UserError, match=r"WrongState: step\(\) reads 'c'.*update.extra has nothing, .* nothing"
    ):
        run(WrongState, 1)


def test_a_parameter_s_name_is_another_error():
    with pytest.raises(KeyError, match=r"head\.bias|query\.bias"):
        run(WrongName, 1)
