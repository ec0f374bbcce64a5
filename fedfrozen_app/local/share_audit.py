"""Record an audited client's share of the noise in the sum, for `fedfrozen audit`.

The vector to be masked is compared with the result of the recorded steps from the round's model, encoded here
without noise. The difference must be the share that the run promises: its size is computed here from the
run's settings, not read from what the client adds.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.files.seal import save_arrays
from fedfrozen_app.local.owed_noise import owed_noise
from fedfrozen_app.privacy.audit_record import RecordedRound, read_round, record_folder, round_files
from fedfrozen_app.privacy.steps import NOISE, SENSITIVITY
from fedfrozen_app.secure.layout import encode
from fedfrozen_app.secure.roster import Roster
from fedfrozen_app.secure.vector import Vector, signed
from fedfrozen_app.secure.work import carriers_of, layout_of, noised, rules_of, updates_of

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


def record_share(
    worker: "Worker",
    client: str,
    privacy: Path,
    request: TrainRequest,
    roster: Roster,
    base: Mapping[str, Tensor],
    examples: int,
    vector: Vector,
    rounding: np.random.Generator,
) -> None:
    """Add this vector's noise to the round's record, if this client is audited. `examples`: the weight of its
    update; `rounding`: in its state from when the vector was made."""
    if worker.config.privacy.audited != client or not noised(request):
        return
    path = round_files(record_folder(privacy, client))[-1]
    known = read_round(path)
    made = {name: torch.from_numpy(value) for name, value in known.made.items()}
    layout, rules = layout_of(request, base), rules_of(request, len(roster.entries))
    bare = encode(layout, rules, updates_of(request, made, base), examples, {}, rounding)
    _, difference = signed(Vector(vector.head, vector.body - bare.body), rules.bits)
    config = worker.config
    owed = owed_noise(config, request.round)
    whole = owed[NOISE] * (owed[SENSITIVITY] * rules.scale("", ()) + math.sqrt(len(vector.body)))
    rewrite(path, known, difference.astype(np.float64) / (whole / math.sqrt(carriers_of(request, roster))))


def rewrite(path: Path, known: RecordedRound, noise: np.ndarray) -> None:
    """Rewrite the record with this noise, in units of its promised size; the steps themselves have none."""
    figures = replace(
        known.figures, squares=float(noise @ noise), elements=len(noise), products=0.0, pairs=0, masked=True
    )
    tensors = {f"made/{name}": torch.from_numpy(value) for name, value in known.made.items()}
    tensors |= {"seen": torch.from_numpy(known.seen), "there": torch.from_numpy(known.there)}
    tensors["first"] = torch.from_numpy(noise).float()
    part = path.with_suffix(".part")
    save_arrays(tensors, part, {"figures": json.dumps(asdict(figures))})
    part.replace(path)
