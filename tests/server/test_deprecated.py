"""Old names of public seams keep working for one release, and warn."""

import importlib
import sys
from dataclasses import dataclass

import pytest
import torch

from fedfrozen_app.core.deprecated import OLD_MODULES
from fedfrozen_app.local.algorithm import Algorithm, Finished, Start
from fedfrozen_app.models.wrapper import Wrapper
from fedfrozen_app.server.aggregate import Update
from fedfrozen_app.server.base import PlannedFedAvg
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server.federation import Federation, Hook

pytestmark = pytest.mark.filterwarnings("always::DeprecationWarning")


def old_algorithm():
    with pytest.warns(DeprecationWarning) as caught:

        @dataclass(frozen=True)
        class Old(Algorithm):
            comes, stays, goes = ("c",), ("c",), ("dc",)
            tells = ("size",)

            def look(self, gradient, start, rate):
                return {**super().look(gradient, start, rate), "c": {"w": gradient}}

            def finish(self, start, trained, steps, rate):
                return Finished(own={"c": start.own["c"]}, reply={"dc": start.order["c"]}, figures={})

    assert all(one.filename == __file__ for one in caught)  # the warning points at the class
    return Old, [str(one.message) for one in caught]


def test_an_algorithm_with_old_names_is_one_with_the_new():
    Old, texts = old_algorithm()
    assert "Old: `stays` is now `client_state`." in texts and len(texts) == 5
    assert (Old.from_server, Old.client_state, Old.to_server) == (("c",), ("c",), ("dc",))
    assert Old.metric_names == ("size",) and Old.trainable_state == ()
    assert Old.has_arrays() and Old().adapts() and not Old.adds_nothing()


def test_super_of_an_old_method_is_the_default():
    Old, _ = old_algorithm()
    assert Old().adapt(torch.ones(()), Start({}, ()), 0.1) == {"c": {"w": torch.ones(())}}


def test_old_fields_and_keywords_of_what_a_client_starts_and_ends_with():
    Old, _ = old_algorithm()
    with pytest.warns(DeprecationWarning, match="Start: `own` is now `client_state`"):
        start = Start({}, (), order={"c": {"w": 1}}, own={"c": {"w": 2}})
    assert start.from_server == {"c": {"w": 1}} and start.client_state == {"c": {"w": 2}}
    with pytest.warns(DeprecationWarning, match="Finished: `figures` is now `metrics`"):
        done = Old().finish(start, {}, torch.ones(()), 0.1)
    assert done.client_state == {"c": {"w": 2}} and done.to_server == {"dc": {"w": 1}}
    with pytest.warns(DeprecationWarning, match="Finished: `reply` is now `to_server`"):
        assert done.reply == done.to_server


def test_a_new_name_beside_the_old_wins():
    with pytest.warns(DeprecationWarning):

        class Both(Algorithm):
            tells = ("old",)
            metric_names = ("new",)

    assert Both.metric_names == ("new",)


def test_a_class_with_new_names_can_be_read_by_the_old():
    class New(Algorithm):
        client_state = ("v",)

    with pytest.warns(DeprecationWarning, match="New: `stays` is now `client_state`"):
        assert New.stays == New().stays == ("v",)


def test_new_names_warn_of_nothing(recwarn):
    class New(Algorithm):
        client_state = ("v",)

    Finished(client_state={}, metrics={})
    Start({}, (), client_state={})
    assert New.client_state == ("v",) and not recwarn.list


def test_a_strategy_with_old_names_is_one_with_the_new():
    with pytest.warns(DeprecationWarning) as caught:

        class Old(PlannedFedAvg):
            tells = ("gap",)

            def figures(self):
                return ("gap_seen",)

            def given(self, client):
                return super().given(client) | {"v": torch.ones(())}

            def judged(self, figures):
                return {**super().judged(figures), "more": 1.0}

            def step(self, update):
                self.carried = {"c": {"w": torch.ones(())}}
                return dict.fromkeys(update.model, update.figures["gap_seen"])

    assert len(caught) == 4 and all(one.filename == __file__ for one in caught)
    strategy = Old(Federation(connect(None, {})))  # type: ignore[arg-type]
    assert strategy.metric_names == ("gap",) and strategy.client_metric_names() == ("gap_seen",)
    assert strategy.per_client_arrays("0") == {"v": torch.ones(())}
    assert strategy.evaluated({"global": 0.5}) == {"global": 0.5, "more": 1.0}
    with pytest.warns(DeprecationWarning, match="Old: `carried` is now `server_state`"):
        assert strategy.step(Update(model={"w": torch.zeros(())}, metrics={"gap_seen": 3.0})) == {"w": 3.0}
    assert strategy.server_state == {"c": {"w": torch.ones(())}}
    with pytest.warns(DeprecationWarning, match="Old: `order` is now `request`"):
        assert strategy.order(1, {}).round == 1


def test_super_of_an_old_method_is_what_the_class_above_has():
    class Above(PlannedFedAvg):
        def per_client_arrays(self, client):
            return {"v": torch.ones(())}

    with pytest.warns(DeprecationWarning):

        class Old(Above):
            def given(self, client):
                return {**super().given(client), "u": torch.zeros(())}

        class Older(Old):
            def given(self, client):
                return {**super().given(client), "t": torch.zeros(())}

    federation = Federation(connect(None, {}))  # type: ignore[arg-type]
    assert set(Old(federation).per_client_arrays("0")) == {"u", "v"}
    assert set(Older(federation).per_client_arrays("0")) == {"t", "u", "v"}


def test_an_old_name_in_a_mixin_is_adopted():
    class Mixin:
        tells = ("gap",)

    with pytest.warns(DeprecationWarning, match="Old: `tells` is now `metric_names`"):

        class Old(Mixin, PlannedFedAvg):
            pass

    assert Old.metric_names == ("gap",)


def test_super_of_a_wrapper_s_old_method():
    with pytest.warns(DeprecationWarning):

        class Old(Wrapper):
            def figures(self, model):
                return {**super().figures(model), "seen": 1.0}

    assert Old().metrics(None) == {"seen": 1.0}  # type: ignore[arg-type]


@pytest.mark.parametrize("old", OLD_MODULES)
def test_an_old_module_is_the_new_one(old, monkeypatch):
    new = importlib.import_module(OLD_MODULES[old])
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"`{old}` is now `{OLD_MODULES[old]}`"):
        assert importlib.import_module(old) is new
    assert new.__spec__ is not None and new.__spec__.name == OLD_MODULES[old]


def test_an_unknown_module_is_still_unknown():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fedfrozen_app.no_such_module")


def test_old_names_in_their_modules():
    from fedfrozen_app.exchange import role, train_request
    from fedfrozen_app.models import roles
    from fedfrozen_app.server import base

    with pytest.warns(DeprecationWarning, match="`Hook` is now"):
        assert base.Hook is Hook
    with pytest.warns(DeprecationWarning, match="`KERNEL` is now"):
        assert roles.KERNEL is role.KERNEL
    with pytest.warns(DeprecationWarning, match="`Order` is now `TrainRequest`"):
        assert train_request.Order is train_request.TrainRequest
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        base.nothing  # noqa: B018
