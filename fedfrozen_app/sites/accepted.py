"""Build an accepted run's configuration from its proposal and the site's view, without composing YAML."""

from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from fedfrozen_app.config import (
    Config,
    DatasetConfig,
    ModelConfig,
    PrivacyConfig,
    RuntimeConfig,
    check_config,
)
from fedfrozen_app.config.schema.dataset_section import PROPOSED
from fedfrozen_app.core import registry
from fedfrozen_app.exchange.proposal import FROM_VIEW, Proposal, read_proposal, strategy_of
from fedfrozen_app.sites.views import View
from fedfrozen_app.tasks.table_targets import survival_model


@dataclass(frozen=True)
class Accepted:
    proposal: Proposal
    view: View
    config: Config


def accepted_run(proposal: Proposal, view: View, model_path: str | None, device: str) -> Accepted:
    """`ValueError` or `UserError` if the package installed here cannot run it."""
    model = proposal.model
    if model.source not in registry.names("models"):
        raise ValueError("model.source is not known to the package installed here")
    privacy = {key: value for key, value in asdict(proposal.privacy).items() if key not in FROM_VIEW}
    privacy |= {"unit": view.unit, "unit_column": view.unit_column, "examples": view.examples}
    config = Config(
        strategy=strategy_of(proposal),
        model=ModelConfig(
            name=proposal.run.id,
            source=model.source,
            path=model_path if model.source == "checkpoint" else None,
            model_type=model.model_type,
            dtype=model.dtype,
            config=dict(model.config),
        ),
        dataset=dataset_of(proposal, view),
        client=proposal.client,
        privacy=PrivacyConfig(**privacy),
        secure_aggregation=proposal.secure_aggregation,
        codec=proposal.codec,
        adapter=proposal.adapter,
        runtime=RuntimeConfig(threads=proposal.run.threads),
        num_rounds=proposal.run.num_rounds,
        eval_every=proposal.run.eval_every,
        seed=proposal.run.seed,
        device=device,
        run_id=proposal.run.id,
    )
    check_config(config)
    return Accepted(proposal, view, config)


def dataset_of(proposal: Proposal, view: View) -> DatasetConfig:
    """The view's dataset. A table's levels, medians and scales are the proposal's: no privacy is spent."""
    found, part = view.dataset(), proposal.table
    if part is None:
        return found
    how = survival_model(part.task)
    return replace(found, normalise=part.normalise, survival_model=how, statistics=PROPOSED)


@lru_cache(maxsize=8)  # one configuration per accepted proposal
def run_of_text(text: str, view: View, model_path: str | None, device: str) -> Accepted:
    return accepted_run(read_proposal(text), view, model_path, device)
