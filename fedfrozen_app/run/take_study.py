"""Run a survival study over the nodes of a grid: each step is sent to the sites that reported counts."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedfrozen_app.exchange.study_messages import study_message
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.report.survival_page import write_page
from fedfrozen_app.secure.certified import Shown
from fedfrozen_app.secure.round_keys import Trust
from fedfrozen_app.server.asking import Asking, Question
from fedfrozen_app.study.conduct import Asked, conduct, conduct_masked
from fedfrozen_app.study.masked_study import ALL_SITES, Answers, MaskedSites
from fedfrozen_app.study.site_sums import read_answer
from fedfrozen_app.study.study_ask import COUNTS, Step, StudyAsk

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sites:
    """Sends steps to the nodes. `make` returns an Asking with this question for these nodes, or for all."""

    ask: StudyAsk
    make: Callable[..., Asking]

    def answers(self, nodes: dict[str, int], step: Step) -> Asked:
        question = Question(
            "survival study",
            lambda node, ttl: study_message(node, self.ask.text, step.text, ttl),
            partial(read_answer, ask=self.ask, step=step),
        )
        asking = self.make(self.ask, question, only=None if step.name == COUNTS else set(nodes.values()))
        asking.run()
        if step.name == COUNTS:
            nodes |= {
                name: asking.nodes[name] for name, one in asking.answers.items() if one.tables is not None
            }
        return asking.answers, asking.refused

    def texts(self, nodes: dict[str, int], texts: Mapping[str, str]) -> Answers:
        """Exchange texts of a masked study: each site gets its own text, and answers with one."""
        whole = texts.get(ALL_SITES)
        by_node = {nodes[name]: text for name, text in texts.items() if name in nodes}
        question = Question(
            "survival study",
            lambda node, ttl: study_message(
                node, self.ask.text, by_node[node] if whole is None else whole, ttl
            ),
            str,
        )
        asking = self.make(self.ask, question, only=None if whole is not None else set(by_node))
        asking.run()
        if whole is not None:
            nodes |= asking.nodes
        return asking.answers, asking.refused


def take_study(
    ask: StudyAsk, make: Callable[..., Asking], folder: Path, trust: Trust | None = None
) -> dict[str, Any]:
    """Write survival.json and survival.html, and return the content of the former. `trust`: verifies keys, if
    sums are masked."""
    sites = Sites(ask, make)
    if ask.masks is None:
        found = conduct(ask, partial(sites.answers, {}))
    else:
        found = conduct_masked(ask, MaskedSites(ask, partial(sites.texts, {}), trust or Shown()))
    write_study(found, folder)
    log.info("Wrote %s", folder / "survival.html")
    return found


def write_study(found: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "survival.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
    write_page(found, folder)
