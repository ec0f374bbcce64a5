"""Membership inference: distinguishing the rows a model was trained on from other rows.

    loss threshold     score(x) = −ℓ(x)                            Yeom et al. 2018
    shadow-calibrated  score(x) = mean ℓ(x) of shadows without x − ℓ(x)    Watson et al. 2022
    update             score(x) = ℓ_before(x) − ℓ_after(x)         what one client's upload did for x

The area under the ROC curve is the probability that a member scores above a non-member: 0.5 is chance level.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from fedfrozen_app.core.seeds import numpy_generator, seed_for, seeded
from fedfrozen_app.data.table import Table
from fedfrozen_app.local.batches import batches
from fedfrozen_app.local.client_optimizer import optimizer_for
from fedfrozen_app.models.task import Batch
from fedfrozen_app.privacy.example_gradients import ExampleGradients, plain_loss

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

DRAWS = 1000  # bootstrap samples behind an interval


@dataclass(frozen=True)
class Pool:
    """Equally many members and non-members, with the same number of each label."""

    members: Table
    others: Table

    @property
    def rows(self) -> Table:
        """Members first."""
        names = self.members.inputs
        inputs = {name: torch.cat([self.members.inputs[name], self.others.inputs[name]]) for name in names}
        return Table(inputs, torch.cat([self.members.labels, self.others.labels]))


def pool_of(members: Table, others: Table, limit: int, seed: int) -> Pool:
    """At most `limit` of each. Labels are balanced, or a client's rare classes would already identify it."""
    generator = numpy_generator(seed, "audit pool")
    chosen: tuple[list[int], list[int]] = ([], [])
    found = [_by_label(table) for table in (members, others)]
    for label in sorted(set(found[0]) & set(found[1])):
        count = min(len(rows[label]) for rows in found)
        for part, rows in zip(chosen, found, strict=True):
            part += generator.permutation(rows[label])[:count].tolist()
    keep = generator.permutation(len(chosen[0]))[:limit]
    return Pool(members.take(np.array(chosen[0])[keep]), others.take(np.array(chosen[1])[keep]))


def _by_label(table: Table) -> dict[str, list[int]]:
    """Row numbers by label; rows whose label is a list of tags or codes form one group."""
    names = [str(value) if table.labels.ndim == 1 else "" for value in table.labels.tolist()]
    found: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        found.setdefault(name, []).append(row)
    return found


def losses_of(worker: "Worker", table: Table, model: Mapping[str, Tensor], size: int = 64) -> np.ndarray:
    """Every row's own loss under these parameters."""
    worker.load(model, {})
    worker.model.eval()
    measure = ExampleGradients(worker.model, worker.task, [], plain_loss)
    parts = []
    for start in range(0, len(table), size):
        part = table.take(torch.arange(start, min(start + size, len(table)))).to(worker.device)
        parts.append(measure.losses(part.inputs, part.labels).double().cpu().numpy())
    return np.concatenate(parts)


def area(members: np.ndarray, others: np.ndarray) -> float:
    """P(member's score > other's score), ties counted half."""
    ranks = rankdata(np.concatenate([members, others]))[: len(members)]
    return float((ranks.sum() - len(members) * (len(members) + 1) / 2) / (len(members) * len(others)))


def interval(members: np.ndarray, others: np.ndarray, seed: int) -> dict[str, float]:
    """The area with its 95 % bootstrap interval, both groups resampled."""
    generator = numpy_generator(seed, "audit bootstrap")
    areas = [
        area(generator.choice(members, len(members)), generator.choice(others, len(others)))
        for _ in range(DRAWS)
    ]
    low, high = np.quantile(areas, [0.025, 0.975])
    return {"auc": area(members, others), "low": float(low), "high": float(high), "rows": len(members)}


def split_scores(scores: np.ndarray, pool: Pool) -> tuple[np.ndarray, np.ndarray]:
    return scores[: len(pool.members)], scores[len(pool.members) :]


def shadow_losses(worker: "Worker", pool: Pool, pairs: int, epochs: int, seed: int) -> np.ndarray:
    """Each row's mean loss under shadow models that were not trained on it.

    Shadows come in pairs that share the pool between them, so that every row has one that never saw it.
    They are trained centrally, without privacy, with the run's optimiser.
    """
    rows = pool.rows
    total = np.zeros(len(rows))
    for pair in range(pairs):
        order = numpy_generator(seed, "audit shadows", pair).permutation(len(rows))
        halves = (order[: len(rows) // 2], order[len(rows) // 2 :])
        for number, (seen, unseen) in enumerate((halves, halves[::-1])):
            model = _train_shadow(worker, rows.take(seen), epochs, seed, f"{pair}.{number}")
            total[unseen] += losses_of(worker, rows.take(unseen), model)
    return total / pairs


def _train_shadow(worker: "Worker", rows: Table, epochs: int, seed: int, name: str) -> dict[str, Tensor]:
    settings = worker.config.client
    worker.load(worker.initial(), {})
    parameters = worker.parameters
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    optimizer = optimizer_for(settings, worker.roles, parameters, settings.lr)
    table = rows.to(worker.device)
    worker.model.train()
    with seeded(seed_for(seed, "audit dropout", name), worker.device):
        for epoch in range(epochs):
            numbers = torch.arange(len(rows))
            for index in batches(numbers, settings, seed, f"audit {name}", epoch):
                part = table.take(index)
                loss = worker.task.loss(parameters, Batch(part.inputs, part.labels))
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    worker.model.eval()
    return {key: value.detach().clone() for key, value in parameters.items()}
