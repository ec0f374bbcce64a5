"""Short runs that only return test metrics; they share a worker if possible."""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from fedfrozen_app.config import ComposedConfig
from fedfrozen_app.data.federated import Shares
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_with

TEST = "test_"


@dataclass
class CentralRuns:
    composed: ComposedConfig
    corpus: Corpus
    worker: Worker | None = None

    def train(self, shares: Shares, excluded: frozenset[str]) -> dict[str, float]:
        """The test metrics after the last round of a run whose clients have these rows."""
        left_out = {"exclude_clients": sorted(excluded) or None}
        composed = replace(self.composed, resolved=self.composed.resolved | left_out)
        config = composed.config
        if self.worker is not None and self.worker.can_switch_to(config):
            self.worker.switch_to(config, shares)
        else:
            self.worker = Worker(config, self.corpus, shares=shares)
        with TemporaryDirectory(prefix="fedfrozen-") as place:
            folder = Path(place) / "run"
            run_with(self.worker, Job(composed, folder, shown=False))
            last = read_rows(folder)[-1]
        return {
            key.removeprefix(TEST): value
            for key, value in last.items()
            if key.startswith(TEST) and isinstance(value, int | float)
        }
