"""Coded broadcasts: the server sends compressed changes of its model, and tracks what clients hold.

The server keeps its exact model w, and for each name the value v that results from its broadcasts. A round's
code encodes w − v; clients add the decoded change to the v that they hold, and train from the result. The
error of a code is part of the next w − v: error feedback at the server (EF21-P, Gruntkowska et al. 2022,
arXiv 2209.15218). Parameters that no client trains in a round are sent exactly: nothing would correct them
later. So is an array to a client without any value from which the codes to v take fewer bytes than the array.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.core.digests import digests
from fedfrozen_app.core.seeds import numpy_generator
from fedfrozen_app.exchange.broadcast import (
    BEFORE,
    bytes_of_digest,
    coded_bytes,
    coder_of,
    digest_in,
    joined,
    most_codes,
)
from fedfrozen_app.exchange.codecs.update_codec import UpdateCodec
from fedfrozen_app.exchange.names import by_namespace, is_parameter, with_namespace
from fedfrozen_app.exchange.train_request import TrainRequest

VALUE, EXACT, CODES = "value", "exact", "codes"  # namespaces in a checkpoint


@dataclass(frozen=True)
class Version:
    """The version of an array that clients hold after the last broadcast, and the codes that led to it."""

    value: Tensor
    digest: str
    exact: str  # the digest of the server's own array at that broadcast
    codes: tuple[tuple[str, Tensor], ...] = ()  # (digest of the value before it, code), oldest first

    def since(self, held: Collection[str]) -> int | None:
        """The number of last codes that a client lacks; None if no code starts from a value that it holds."""
        for count, (before, _) in enumerate(reversed(self.codes), 1):
            if before in held:
                return count
        return None


@dataclass
class Broadcast:
    codec: tuple[str, Any] | None = None  # None: arrays are sent as they are
    seed: int = 0
    _versions: dict[str, Version] = field(default_factory=dict)

    @cached_property
    def coder(self) -> UpdateCodec | None:
        return None if self.codec is None else coder_of(self.codec)

    def begin(
        self, request: TrainRequest, model: dict[str, Tensor]
    ) -> tuple[TrainRequest, dict[str, Tensor]]:
        """The round's request for the values that clients will hold, and the model from which they train."""
        if self.coder is None:
            return request, model
        names = [name for name in request.base if is_parameter(name)]
        trained, changed = {*request.plan.trained}, dict[str, Tensor]()
        codes: dict[str, Tensor] = {}
        for name in names:
            exact, known = model[name], self._versions.get(name)
            same = known is not None and known.exact == request.base[name]
            if same and (name in trained or not self._versions[name].codes):
                continue  # a round without a result is repeated from the same model
            coded = None
            if known is not None and name in trained and most_codes(self.coder, exact):
                coded = self._coded(request.round, name, exact, known.value)
            if coded is None:
                self._versions[name] = Version(exact, request.base[name], request.base[name])
            else:
                codes[name], changed[name] = coded
        for name, digest in digests(changed).items():
            known = self._versions[name]
            links = (*known.codes, (known.digest, codes[name]))
            most = most_codes(self.coder, changed[name])
            self._versions[name] = Version(changed[name], digest, request.base[name], links[-most:])
        base = {name: self._versions[name].digest for name in names}
        held = {name: self._versions[name].value for name in names}
        return replace(request, base={**request.base, **base}), {**model, **held}

    def _coded(
        self, server_round: int, name: str, exact: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """The code and the resulting value; None if that is not finite."""
        assert self.coder is not None
        drawn = numpy_generator(self.seed, "broadcast", server_round, name)
        code = torch.from_numpy(np.ascontiguousarray(self.coder.pack_array((exact - before).cpu(), drawn)))
        try:
            value = self.coder.applied(code, before)
        except ValueError:
            return None
        return (code, value) if bool(torch.isfinite(value).all()) else None

    def codes_for(self, name: str, digest: str, held: Collection[str]) -> int:
        """The number of codes of this array to send to a client with these digests; 0: the array itself."""
        known = self._versions.get(name)
        if known is None or known.digest != digest:  # an array for this client alone
            return 0
        return known.since(held) or 0

    def joined(self, name: str, count: int) -> Tensor:
        """The array's last codes, in wire format."""
        last = self._versions[name].codes[-count:]
        return joined(last[0][0], [code for _, code in last])

    def bytes_of(self, name: str, array: Tensor, digest: str, held: Collection[str]) -> int:
        """Bytes to send for an array that such a client lacks."""
        count = self.codes_for(name, digest, held)
        return array.nbytes if self.coder is None or not count else coded_bytes(self.coder, array, count)

    # Checkpoints -------------------------------------------------------------------------------------

    def state(self, digests_now: Mapping[str, str]) -> dict[str, Tensor]:
        """The arrays for a checkpoint: values that differ from the model's (`digests_now`), and all codes."""
        found: dict[str, Tensor] = {}
        for name, known in self._versions.items():
            if known.codes or known.digest != digests_now.get(name):
                found[with_namespace(VALUE, name)] = known.value
                found[with_namespace(EXACT, name)] = bytes_of_digest(known.exact)
            if known.codes:
                parts = [joined(before, [code]) for before, code in known.codes]
                found[with_namespace(CODES, name)] = torch.cat(parts)
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        spaces = by_namespace(state)
        if self.coder is None or VALUE not in spaces:
            return
        values = spaces[VALUE]
        for name, digest in digests(values).items():
            size = BEFORE + self.coder.size_of(values[name])
            kept = spaces.get(CODES, {}).get(name)
            parts = () if kept is None else kept.cpu().split(size)
            links = tuple((digest_in(part[:BEFORE]), part[BEFORE:].clone()) for part in parts)
            exact = digest_in(spaces[EXACT][name].cpu())
            self._versions[name] = Version(values[name], digest, exact, links)
