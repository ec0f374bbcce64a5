"""What a pruned upload holds, what the server makes of it, and what it refuses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfrozen_app.exchange.count import bytes_by_role
from fedfrozen_app.exchange.prune import MASK, Prune
from fedfrozen_app.exchange.role import Role

ROLES = {"a": Role("query", 0), "b": Role("mlp", 1), "head": Role("head")}
BASE = {"a": torch.zeros(2, 3), "b": torch.ones(5), "head": torch.zeros(2)}
HALF = Prune(0.5)


def test_by_hand():
    trained = {
        "a": torch.tensor([[0.0, -3.0, 1.0], [2.0, 0.5, 0.0]]),
        "b": torch.tensor([1.0, 9.0, 1.5, 1.0, 0.0]),
        "head": torch.tensor([0.1, 0.2]),
    }
    sent = HALF.encode(trained, BASE, ROLES)
    assert sent["a"].tolist() == [-3.0, 1.0, 2.0]  # 3 of 6
    assert sent["b"].tolist() == [9.0, 1.5, 0.0]  # 3 of 5: |8|, |0.5|, |-1|
    assert sent["head"].tolist() == trained["head"].tolist()
    assert sent[MASK].tolist() == [0b01110001, 0b10100000]  # 011100 then 01101, then padding
    whole = HALF.decode(sent, BASE, ROLES)
    assert whole["a"].tolist() == [[0.0, -3.0, 1.0], [2.0, 0.0, 0.0]]
    assert whole["b"].tolist() == [1.0, 9.0, 1.5, 1.0, 0.0]
    assert dict(bytes_by_role(sent, ROLES, HALF.extra_names)) == {
        "query": 12,
        "mlp": 12,
        "head": 8,
        "mask": 2,
    }
    assert HALF.sizes(BASE, BASE, ROLES) == {"query": 12, "mlp": 12, "head": 8, "mask": 2}


@given(st.floats(0.01, 1.0), st.lists(st.integers(1, 40), min_size=2, max_size=2), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_what_is_sent_is_exact_and_what_is_not_is_unchanged(keep, sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    base = {name: torch.randn(size, generator=generator) for name, size in zip("ab", sizes, strict=True)}
    trained = {name: value + torch.randn(len(value), generator=generator) for name, value in base.items()}
    whole = Prune(keep).decode(Prune(keep).encode(trained, base, ROLES), base, ROLES)
    for name, value in whole.items():
        kept = value == trained[name]
        assert int(kept.sum()) == math.ceil(keep * len(value))
        assert torch.equal(value[~kept], base[name][~kept])
        moved = (trained[name] - base[name]).abs()
        assert kept.all() or moved[kept].min() >= moved[~kept].max()


def test_a_mask_that_does_not_fit_is_refused():
    sent = HALF.encode({name: value + 1 for name, value in BASE.items()}, BASE, ROLES)
    for change in (
        {MASK: None},
        {MASK: sent[MASK][:1]},
        {MASK: sent[MASK].float()},
        {MASK: torch.full_like(sent[MASK], 255)},
        {"a": sent["a"][:2]},
        {"b": sent["b"].double()},
    ):
        broken = {name: value for name, value in (sent | change).items() if value is not None}
        with pytest.raises(ValueError, match="mask"):
            HALF.decode(broken, BASE, ROLES)
    assert HALF.decode({"head": BASE["head"]}, BASE, ROLES) == {"head": BASE["head"]}
