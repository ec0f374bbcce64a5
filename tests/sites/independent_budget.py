"""What a site has paid, by its two records and by an accountant that shares no code with ours."""

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import RDPAccountant as OpacusRdp

from fedfrozen_app.privacy.budget import Budget, BudgetFile
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.site_budget import SiteBudget


def requests_trained(kit: Kit) -> list[int]:
    """The rounds whose request the site trained for, each once: what it sent again was the same."""
    sent = [entry for entry in read_audit(kit.audit) if entry["event"] == "sent"]
    fresh = [entry for entry in sent if not entry["again"]]
    assert len({entry["order"] for entry in fresh}) == len(fresh), "it has trained twice for a request"
    rounds = [entry["round"] for entry in fresh]
    assert len(set(rounds)) == len(rounds), "two requests of one round"
    return rounds


def check_budget(kit: Kit, steps: int, epsilon: float | None = None) -> float:
    """Both records count exactly the requests that it trained for, of so many steps each; the epsilon of all
    is `epsilon`, where the server knows of all."""
    requests = len(requests_trained(kit))
    (entry,) = SiteBudget(kit.var / "state" / "budget.json").charged().values()
    assert len(entry["rounds"]) == requests
    budget = budget_of(kit)
    assert budget.rounds == requests
    assert sum(step.times for step in budget.steps) == steps * requests
    spent = epsilon_of_requests(kit, steps)
    assert epsilon is None or epsilon == pytest.approx(spent, rel=0.01)
    return spent


def budget_of(kit: Kit) -> Budget:
    """The client's own record, of the only run."""
    (folder,) = (kit.var / "state").glob("*/*/privacy")
    budget = BudgetFile(folder, kit.name).read()
    assert budget is not None
    return budget


def epsilon_of_requests(kit: Kit, steps: int, requests: int | None = None) -> float:
    """Of its first so many requests, of so many steps each; None: of all that it trained for."""
    budget = budget_of(kit)
    requests = budget.rounds if requests is None else requests
    (paid,) = {(step.noise, step.rate) for step in budget.steps}
    accountant = RdpAccountant(OpacusRdp.DEFAULT_ALPHAS)
    event = PoissonSampledDpEvent(paid[1], GaussianDpEvent(paid[0]))
    accountant.compose(SelfComposedDpEvent(event, steps * requests))
    return float(accountant.get_epsilon(budget.delta))
