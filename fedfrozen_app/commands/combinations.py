"""`python -m fedfrozen_app.commands.combinations` writes docs/combinations.md: what goes with what.

Each cell is determined by composing the run and calling the checks that would refuse it, as the run itself
does. A slow test runs all combinations. Another test fails if the page is outdated.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from fedfrozen_app.commands.forecast import Ground, ground_of, outlined
from fedfrozen_app.config import Config, compose_run
from fedfrozen_app.core import registry
from fedfrozen_app.core.conf_files import conf_dir
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.local.cohort import cannot_serve
from fedfrozen_app.privacy.coverage import reason_not_covered
from fedfrozen_app.run.outline import requests
from fedfrozen_app.server.base import PlannedFedAvg

PAGE = conf_dir().parent / "docs" / "combinations.md"
WORKS = "works"
HEAD = """\
# What goes with what

<!-- Written by `python -m fedfrozen_app.commands.combinations`: run it again when a test asks for it. -->

Every strategy, as its own file sets it, with what else a run may ask for. What does not work is refused
before the first round, in the words of the notes; where the cohort runner cannot serve a round, the
sequential one does, and the log gives the reason. Settings may change an answer, as `strategy.private=[]`
does.

"""


@dataclass(frozen=True)
class Column:
    """A column of the page: `words` are its overrides; `refusal` returns why a composed run is refused."""

    title: str
    words: tuple[str, ...]
    refusal: Callable[[Config, PlannedFedAvg], str | None] = lambda config, strategy: None


def _cohort(config: Config, strategy: PlannedFedAvg) -> str | None:
    reasons = [reason for request in requests(strategy) if (reason := cannot_serve(request))]
    return f"Clients train one by one, because {reasons[0]}." if reasons else None


def _private(config: Config, strategy: PlannedFedAvg) -> str | None:
    return next((reason for request in requests(strategy) if (reason := reason_not_covered(request))), None)


def columns() -> list[Column]:
    optimizers = [name for name in registry.BUILT_IN["server_optimizers"] if name != "none"]
    return [
        Column("cohort runner", ("runtime.runner=cohort",), _cohort),
        Column("DP-SGD", ("privacy=dp_sgd",), _private),
        *(Column(f"`aggregation={rule}`", (f"aggregation={rule}",)) for rule in ("median", "krum")),
        Column("`warmup_rounds`", ("strategy.warmup_rounds=1",)),
        *(Column(f"`server_optimizer={name}`", (f"server_optimizer={name}",)) for name in optimizers),
        Column("`adapter=lora`", ("adapter=lora",)),
        Column("`adapter.rule=stack`", ("adapter=lora", "adapter.rule=stack")),
        Column("masked", ("secure_aggregation=on",)),
        Column("`pacing=buffered`", ("clock=profiles", "pacing=buffered")),
        Column("deployed", ("runtime=deployed",)),
    ]


def combination(name: str, column: Column, known: dict[str, Ground]) -> str:
    """WORKS, or one sentence why not."""
    try:
        config = compose_run([f"strategy={name}", "num_rounds=20", *column.words]).config
        key = repr((config.dataset, config.seed))
        if key not in known:
            known[key] = ground_of(config)
        return column.refusal(config, outlined(config, known[key])) or WORKS
    except UserError as error:
        return str(error)


def page() -> str:
    known: dict[str, Ground] = {}
    shown, notes = columns(), dict[str, int]()
    lines = [
        "| strategy | " + " | ".join(column.title for column in shown) + " |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for name in registry.BUILT_IN["strategies"]:
        cells = []
        for column in shown:
            found = combination(name, column, known)
            cells.append("yes" if found == WORKS else f"no ({notes.setdefault(found, len(notes) + 1)})")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    sentences = [f"{number}. {_quoted(sentence)}" for sentence, number in notes.items()]
    return HEAD + "\n".join(lines) + "\n\n" + "\n".join(sentences) + "\n"


def _quoted(sentence: str) -> str:
    """Format settings as code."""
    return re.sub(r"(?<![\w`'])([a-z_]+(?:\.[a-z_]+)*=\w+)", r"`\1`", sentence)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
