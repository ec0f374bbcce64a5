"""A round among parties in this process, step by step, with whoever drops out at each step."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fedfrozen_app.secure import client
from fedfrozen_app.secure.roster import Terms
from fedfrozen_app.secure.round_keys import OnSight, Simulated, new_seed
from fedfrozen_app.secure.sum_up import Collector
from fedfrozen_app.secure.vector import Vector, packed_size, unpacked

TRUST = OnSight()


def terms(
    threshold: float = 2 / 3, neighbours: int | None = None, session: str = "s", request: str = "o"
) -> Terms:
    return Terms(session, request, 1, threshold, neighbours)


@dataclass
class Round:
    """`gone[step]`: who does not answer at that step (keys, shares, mask, confirm, unmask) or later."""

    names: Sequence[str]
    terms: Terms = field(default_factory=terms)
    gone: Mapping[str, Collection[str]] = field(default_factory=dict)
    fewest: int = 2
    bits: int = 32
    wire: list[bytes] = field(default_factory=list)  # every vector as it travelled

    def __post_init__(self) -> None:
        self.identities = {name: Simulated(new_seed()) for name in self.names}
        self.sessions: dict[str, client.Session] = {}
        self.collector = Collector(self.terms, self.fewest)
        self.left = list(self.names)

    def _those_at(self, step: str) -> list[str]:
        self.left = [name for name in self.left if name not in self.gone.get(step, ())]
        return self.left

    def keys(self) -> str:
        entries = {}
        for name in self._those_at("keys"):
            self.sessions[name], entries[name] = client.begin(name, self.terms, self.identities[name])
        return self.collector.take_keys(entries).text

    def shares(self, roster: str) -> dict[str, dict[str, bytes]]:
        sent = {}
        for name in self._those_at("shares"):
            self.sessions[name], sent[name] = client.share(self.sessions[name], roster, TRUST, self.fewest)
        return self.collector.take_shares(sent)

    def masks(self, envelopes: Mapping[str, Mapping[str, bytes]], vectors: Mapping[str, Vector]) -> list[str]:
        some = next(iter(vectors.values()))
        self.collector.expect(len(some.head), len(some.body), self.bits)
        for name in self._those_at("mask"):
            opened = client.open_envelopes(self.sessions[name], envelopes[name], self.collector.present(name))
            vector = Vector(vectors[name].head.copy(), vectors[name].body.copy())
            # As a runtime does that carries clients from process to process.
            self.sessions[name] = client.Session.read(client.mask(opened, vector).text())
            self.wire.append(vector.packed(self.bits).tobytes())
            assert len(self.wire[-1]) == packed_size(len(vector.head), len(vector.body), self.bits)
            self.collector.take_vector(name, unpacked(self.wire[-1], len(vector.head), self.bits))
        return self.collector.close()

    def confirmations(self, survivors: list[str]) -> dict[str, bytes]:
        found = {}
        for name in self._those_at("confirm"):
            self.sessions[name], found[name] = client.confirm(
                self.sessions[name], survivors, self.identities[name], self.fewest
            )
        self.collector.take_confirmations(len(found))
        return found

    def unmask(self, confirmations: Mapping[str, bytes]) -> Vector:
        for name in self._those_at("unmask"):
            self.sessions[name], own, keys = client.unmask(self.sessions[name], confirmations, TRUST)
            self.collector.take_unmasking(name, own, keys)
        return self.collector.finish()

    def run(self, vectors: Mapping[str, Vector]) -> Vector:
        survivors = self.masks(self.shares(self.keys()), vectors)
        return self.unmask(self.confirmations(survivors))
