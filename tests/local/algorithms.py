"""Client algorithms with arrays of their own, for tests of the runners."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from fedfrozen_app.exchange.plan import Phase
from fedfrozen_app.local.algorithm import Algorithm, Finished, squared_distance


@dataclass(frozen=True)
class OwnModel(Algorithm):
    """Ditto, Li et al. 2021: FedAvg for w, and beside it v with f(v) + (λ/2)‖v − w_t‖²."""

    client_state, trains = ("v",), ("v",)

    def start(self, model, own):
        return {"v": {name: own.get("v", {}).get(name, value) for name, value in model.items()}}

    def loss(self, parameters, batch, task, start):
        v = start.client_state["v"]
        near = squared_distance(v, start.anchor)
        return task.loss(parameters, batch) + task.loss(v, batch) + 0.5 * near


@dataclass(frozen=True)
class Contrast(Algorithm):
    """MOON, Li et al. 2021: a row's representation near the global model's, far from its own one before."""

    client_state = ("previous",)

    def start(self, model, own):
        return own if own else {"previous": dict(model)}  # then both terms are equal, and nothing is pulled

    def loss(self, parameters, batch, task, start):
        logits, here = task.features(parameters, batch)
        near, far = (
            task.features(other, batch)[1] for other in (start.anchor, start.client_state["previous"])
        )
        pairs = torch.stack([functional.cosine_similarity(here, other) for other in (near, far)], dim=1)
        apart = functional.cross_entropy(pairs, torch.zeros_like(batch.labels), reduction="none")
        weight = torch.ones_like(apart) if batch.mask is None else batch.mask
        return task.loss_of(logits, batch) + (apart * weight).sum() / weight.sum().clamp(min=1e-9)

    def finish(self, start, trained, steps, rate):
        return Finished(client_state={"previous": dict(trained)})


class Normalised(Algorithm):
    """FedNova, Wang et al. 2020: what is sent is w_t + Δᵢ/K, and K beside it."""

    metric_names = ("steps",)

    def finish(self, start, trained, steps, rate):
        sent = {
            name: start.model[name] + (value - start.model[name]) / steps for name, value in trained.items()
        }
        return Finished(model=sent, metrics={"steps": steps})


def private_head(plan, roles):
    return plan.keep_private(name for name in plan.trained if roles[name].kind == "head")


def head_first(plan, roles):
    head = tuple(name for name in plan.trained if roles[name].kind == "head")
    body = tuple(name for name in plan.trained if name not in head)
    return private_head(plan, roles).in_phases(Phase(head, epochs=2), Phase(body))
