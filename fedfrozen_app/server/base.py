"""The base of every strategy: FedAvg with a named plan per round. A strategy overrides seams (seams.py)."""

import time

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedfrozen_app.core.deprecated import old_names
from fedfrozen_app.core.digests import start_digests
from fedfrozen_app.core.logs import about
from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.files.rows import Row
from fedfrozen_app.server.federation import Evaluate, Federation, Settings
from fedfrozen_app.server.live_round import LiveRound
from fedfrozen_app.server.loop import close_round
from fedfrozen_app.server.masked_paced_round import MaskedPacedRound
from fedfrozen_app.server.paced_round import PacedRound
from fedfrozen_app.server.seams import StrategySeams
from fedfrozen_app.server.train_round import TrainRound

__all__ = ["Federation", "PlannedFedAvg", "Settings"]


class PlannedFedAvg(StrategySeams):
    """FedAvg with a named plan per round in place of "everything, always".

    It holds the full model, adds replies one by one to a running sum, and merges by parameter name.
    """

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run the rounds; `Result.arrays` is the full model. The two configurations are not used."""
        self.model = to_tensors(initial_arrays)
        del initial_arrays  # otherwise the first model stays in memory to the end
        self.model_digests.expect(start_digests(self.model))
        transport = self.federation.connection.transport
        transport.grid, transport.timeout = grid, timeout
        self.num_rounds = num_rounds
        result = Result()
        for earlier in self.history:
            self.recall(earlier)
        if self.first_round == 1:
            self._close_round({"round": 0, "stage": "initial"}, time.perf_counter(), evaluate_fn)
        for server_round in range(self.first_round, num_rounds + 1):
            began = time.perf_counter()
            with about(round=server_round):
                row = self._train_round(server_round)
                stop = self._close_round(row, began, evaluate_fn)
            if stop:
                break
        result.arrays = to_record(self.model, local=True)
        return result

    def _train_round(self, server_round: int) -> Row:
        kind: type[TrainRound] = TrainRound
        if (pacing := self.federation.connection.pacing) is not None:
            masked = self.federation.secure.name == "on"
            kind = LiveRound if pacing.live else MaskedPacedRound if masked else PacedRound
        return kind(self, server_round).run()

    def _close_round(self, row: Row, began: float, evaluate_fn: Evaluate | None) -> bool:
        return close_round(self, row, began, evaluate_fn)


# Old names, for one release.
__getattr__ = old_names(__name__, Hook="fedfrozen_app.server.federation:Hook")
