"""Clients whose gradients are not finite."""

import torch

from fedfrozen_app.local import private_sums
from fedfrozen_app.privacy.budget import BudgetFile


def reply_of(run, client):
    file = BudgetFile(run.folder / "privacy", client)
    return file.kept_reply(file.read().last_order)


def spoil_first_example(monkeypatch):
    """Of every chunk the first client's first example is not finite; which chunks there were."""
    seen = []
    plain = private_sums.norms_of

    def spoiled(gradients, lead):
        norms = plain(gradients, lead)
        seen.append(norms.shape)
        gradients[0][0, 0] = torch.nan
        norms[0, 0] = torch.nan
        return norms

    monkeypatch.setattr(private_sums, "norms_of", spoiled)
    return seen
