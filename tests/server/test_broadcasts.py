"""Coded broadcasts: what a client trains from is what the ledger says it holds, and codes lead there."""

import pytest
import torch

from fedfrozen_app.core.digests import digest, digests
from fedfrozen_app.core.seeds import numpy_generator
from fedfrozen_app.exchange.broadcast import (
    BEFORE,
    coded_bytes,
    coded_name,
    coder_of,
    most_codes,
    with_decoded,
)
from fedfrozen_app.exchange.cache import Cache
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import TrainRequest, read_train_request
from fedfrozen_app.server.coded_broadcast import Broadcast

INT8 = ("int8", {"block": 8, "rotate": False})
NAMES = ("a", "b")


def request_for(number, model, trained=NAMES):
    plan = Plan(trained, trained, ())
    return TrainRequest(number, plan, digests(model))


def model_of(*values):
    """`a` is long enough for codes, `b` is not."""
    return {"a": torch.cat([torch.tensor(values), torch.zeros(64 - len(values))]), "b": torch.ones(2)}


class Client:
    """Holds what it was sent, as a node's cache does."""

    def __init__(self):
        self.cache, self.held = Cache(), frozenset()

    def receive(self, broadcast, request, model):
        """What it ends the round with, and the bytes that it was sent; it never lacks anything."""
        sent = {}
        for name in (name for name, known in request.base.items() if known not in self.held):
            count = broadcast.codes_for(name, request.base[name], self.held)
            sent[coded_name(name) if count else name] = (
                broadcast.joined(name, count) if count else model[name]
            )
        read = read_train_request(request.json)
        known = with_decoded(INT8, read.base, sent, self.cache)
        found, lacks = self.cache.complete(read.base, known, verify=True)
        assert not lacks
        self.held = request.base_digests
        return found, {name: value.nbytes for name, value in sent.items()}


def test_a_broadcast_by_hand():
    """The second round's code is of w − v; what it lost is in the third round's."""
    broadcast, coder = Broadcast(INT8, seed=3), coder_of(INT8)
    first = model_of(1.0, 2.0)
    request, held = broadcast.begin(request_for(1, first), first)
    assert request.base == digests(first)
    second = model_of(1.0 + 127.0, 2.0 + 0.5)  # scale 1: a half becomes 0 or 1
    request, held = broadcast.begin(request_for(2, second), second)
    coin = numpy_generator(3, "broadcast", 2, "a").random((8, 8))[0, 1]
    step = float(coin >= 0.5)
    assert held["a"][:2].tolist() == [128.0, 2.0 + step] and request.base["a"] == digest(held["a"])
    assert broadcast.bytes_of("a", held["a"], request.base["a"], {digest(first["a"])}) == BEFORE + 8 * 4 + 64
    assert coder.size_of(held["a"]) == 96
    assert broadcast.begin(request_for(3, second), second)[0].base == request.base  # the model is as it was
    third = second | {"b": torch.zeros(2), "a": second["a"].clone()}
    third["a"][60] = 1.0  # in another block
    request, held = broadcast.begin(request_for(4, third), third)
    assert torch.allclose(held["a"], third["a"], atol=1e-6)  # ±½ is the largest of its block, and so exact


def test_what_was_lost_comes_later():
    """v stays within one code's error of w for ever, in whatever direction w goes."""
    broadcast = Broadcast(("topk", {"share": 0.1}), seed=1)
    generator, model = torch.Generator().manual_seed(0), {"a": torch.zeros(640)}
    for number in range(1, 61):
        model = {"a": model["a"] + torch.randn(640, generator=generator) * (1.0 if number < 30 else 1e-9)}
        _, held = broadcast.begin(request_for(number, model, ("a",)), model)
    assert torch.allclose(held["a"], model["a"], atol=1e-6)  # thirty rounds of a tenth each


def test_clients_that_skip_rounds_hold_the_same():
    """One takes part always, one now and then, one joins late; all decode the digests of the request."""
    broadcast, clients = Broadcast(INT8), [Client(), Client(), Client()]
    generator, model = torch.Generator().manual_seed(1), model_of()
    sizes = []
    for number in range(1, 9):
        model = {name: value + torch.randn(value.shape, generator=generator) for name, value in model.items()}
        request, held = broadcast.begin(request_for(number, model), model)
        present = [clients[0]] + [clients[1]] * (number in (1, 3, 8)) + [clients[2]] * (number == 8)
        found = [client.receive(broadcast, request, held) for client in present]
        assert all(torch.equal(found[0][0][name], one[name]) for one, _ in found for name in NAMES)
        sizes.append([size for _, size in found])
    most = most_codes(coder_of(INT8), model["a"])
    assert most == 2 and coded_bytes(coder_of(INT8), model["a"], most) < model["a"].nbytes
    assert sizes[2][1] == {"coded/a": BEFORE + 2 * 96, "b": 8}  # two rounds behind: two codes
    assert sizes[7] == [{"coded/a": BEFORE + 96, "b": 8}, {"a": 256, "b": 8}, {"a": 256, "b": 8}]


def test_what_does_not_train_is_exact():
    """Nothing would correct a frozen array later: it is sent once more, and then never."""
    broadcast, first, second = Broadcast(INT8), model_of(1.0), model_of(2.0, 0.3)
    broadcast.begin(request_for(1, first), first)
    _, coded = broadcast.begin(request_for(2, second), second)
    request, held = broadcast.begin(request_for(3, second, ("b",)), second)
    assert torch.equal(held["a"], second["a"]) and not torch.equal(coded["a"], second["a"])
    assert broadcast.codes_for("a", request.base["a"], {digest(coded["a"])}) == 0
    assert broadcast.begin(request_for(4, second, ("b",)), second)[0].base == request.base


@pytest.mark.parametrize("spoilt", ["length", "scale", "beginning", "type"])
def test_codes_that_cannot_be_read_are_asked_for(spoilt):
    broadcast, client = Broadcast(INT8), Client()
    first, second = model_of(1.0), model_of(2.0, 0.3)
    client.receive(broadcast, *broadcast.begin(request_for(1, first), first))
    request, _ = broadcast.begin(request_for(2, second), second)
    code = broadcast.joined("a", 1).clone()
    if spoilt == "length":
        code = code[:-1]
    elif spoilt == "scale":
        code[BEFORE : BEFORE + 4] = 255  # a NaN
    elif spoilt == "beginning":
        code[0] += 1
    else:
        code = code.float()
    sent = with_decoded(INT8, request.base, {coded_name("a"): code, "b": second["b"]}, client.cache)
    assert client.cache.complete(request.base, sent, verify=True)[1] == ["a"]


def test_a_change_that_no_code_can_say_is_sent_whole():
    broadcast, first = Broadcast(INT8), model_of(1.0)
    broadcast.begin(request_for(1, first), first)
    second = model_of(float("inf"))
    request, held = broadcast.begin(request_for(2, second), second)
    assert request.base == digests(second) and torch.equal(held["a"], second["a"])


def test_a_checkpoint_continues_the_codes():
    """The next round's codes and digests are the same after the state was written and read."""
    generator, model = torch.Generator().manual_seed(1), model_of()
    before, after = Broadcast(INT8, seed=5), Broadcast(INT8, seed=5)
    for number in range(1, 5):
        model = {name: value + torch.randn(value.shape, generator=generator) for name, value in model.items()}
        request, _ = before.begin(request_for(number, model), model)
    model = {name: value + 1 for name, value in model.items()}
    after.load_state(before.state(digests(model)))
    held = [{digest(torch.zeros(1)), *request.base_digests}]
    one, other = (each.begin(request_for(5, model), model) for each in (before, after))
    assert one[0].json == other[0].json
    counts = [each.codes_for("a", one[0].base["a"], held[0]) for each in (before, after)]
    assert counts == [1, 1] and torch.equal(before.joined("a", 2), after.joined("a", 2))
