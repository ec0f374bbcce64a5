"""How many people a run would read at this site, and how many bytes would leave it: by role, in all."""

from collections import Counter
from dataclasses import dataclass

from fedfrozen_app.config import Config
from fedfrozen_app.data.federated import input_shape, load_corpus
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.data.text_reading import reading_of_spec
from fedfrozen_app.exchange.count import count_parameters
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.models.build import parameters_of
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.models.wrapper import wrapper_of
from fedfrozen_app.run.outline import planning_strategy
from fedfrozen_app.sites.accepted import run_of_text
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.views import View

MOST_WALKED = 1000  # rounds; later ones count as the last: a server may ask for any number


@dataclass(frozen=True)
class Survey:
    """Of one proposal and one view."""

    rows: int  # that a round may train on
    people: int | None  # to whom these rows belong; None if the view has no unit column
    columns: tuple[str, ...]  # of the data, besides what the model reads
    trained: int  # parameters that the largest round trains
    parameters: int  # of the model
    by_role: dict[str, int]  # bytes that leave over the whole run, if the site takes part in every round
    largest_round: int  # bytes

    @property
    def total(self) -> int:
        return sum(self.by_role.values())


def survey(proposal: Proposal, view: View, kit: Kit) -> Survey:
    """Reads the view's data as a round would. `ValueError` or `UserError` if the run cannot be done here."""
    config = run_of_text(proposal.text, view, kit.model_path, "cpu").config
    reading = reading_of_spec(proposal.data_spec.get("text"))
    corpus = load_corpus(
        config,
        None,
        tuple(proposal.data.classes),
        site=True,
        reading=reading,
        data_spec=proposal.data_spec,
    )
    by_role, largest, trained, parameters = sizes(config, corpus)
    return Survey(
        len(corpus.train),
        count_people(corpus, view),
        tuple(sorted(corpus.columns)),
        trained,
        parameters,
        by_role,
        largest,
    )


def count_people(corpus: Corpus, view: View) -> int | None:
    """As `row_counts.count_rows` does it for the rows of a round."""
    if view.unit == "example":
        return len(corpus.train)
    if view.unit != "patient" or view.column not in corpus.columns:
        return None
    return len(set(corpus.columns[view.column]))


def sizes(config: Config, corpus: Corpus) -> tuple[dict[str, int], int, int, int]:
    """(bytes up by role, bytes of the largest round, parameters trained at most, parameters of the model)."""
    wrapper = wrapper_of(config)
    model = wrapper.outline(config, input_shape(corpus, config))
    fixed = wrapper.fixed_names(model)
    arrays = {name: value for name, value in parameters_of(model).items() if name not in fixed}
    strategy = planning_strategy(config, arrays, roles_of(model))
    total: Counter[str] = Counter()
    largest = trained = 0
    up: dict[str, int] = {}
    for number in range(1, min(config.num_rounds, MOST_WALKED) + 1):
        up = strategy.upload_bytes(number)
        total.update(up)
        largest = max(largest, sum(up.values()))
        trained = max(trained, count_parameters(arrays, strategy.client_plan(number).trained))
    for role, size in up.items():
        total[role] += size * max(0, config.num_rounds - MOST_WALKED)
    return dict(total), largest, trained, sum(value.numel() for value in arrays.values())


def survey_lines(found: Survey) -> list[str]:
    """For the command line."""
    people = "people: the view does not say whose rows they are"
    if found.people is not None:
        people = f"of {found.people:,} people"
    roles = ", ".join(f"{role} {size:,}" for role, size in found.by_role.items())
    return [
        f"reads     {found.rows:,} rows {people}",
        f"trains    {found.trained:,} of {found.parameters:,} parameters",
        f"bytes     {found.total:,} in all, {found.largest_round:,} in a round at most: {roles or 'none'}",
    ]
