"""The clients' data: tables on the device, and which rows belong to which client."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.config import Config
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.augment import taken
from fedfrozen_app.data.federated import ClientRows, Shares, client_rows
from fedfrozen_app.data.table import Corpus, Table
from fedfrozen_app.models.task import Inputs


@dataclass(frozen=True)
class ClientData:
    """The rows of all clients of this process. A site has one client, which holds all of them."""

    config: Config
    corpus: Corpus
    shares: Shares
    train_table: Table
    test_table: Table
    novel_table: Table | None  # test rows of classes that are not trained
    dtype: torch.dtype  # of class weights
    _rows: dict[str, ClientRows] = field(default_factory=dict)

    def for_run(self, config: Config, shares: Shares) -> "ClientData":
        """The same tables with another run's partition."""
        return replace(self, config=config, shares=shares, _rows={})

    def rows(self, client: str) -> ClientRows:
        """A client's row numbers, on the host: batches are drawn there and sent to the device together."""
        if client not in self._rows:
            parts = self.shares.partition
            rows = np.arange(len(self.train_table)) if parts is None else parts.indices[int(client)]
            # A site's rows are its own choice: the server's seed does not decide which it holds out.
            seed = self.config.dataset.split_seed if parts is None else self.config.seed
            self._rows[client] = client_rows(rows, self.corpus, self.config, client, seed)
        return self._rows[client]

    @property
    def augments(self) -> bool:
        """Whether training images are shifted and flipped."""
        return augments(self.config)

    def take(self, numbers: Tensor) -> tuple[Inputs, Tensor]:
        """The examples that a client drew for a training step."""
        table = self.train_table
        return taken(table.inputs, table.labels, numbers, augmented=self.augments)

    def class_weights(self, index: Tensor) -> Tensor:
        """n / (classes · count), and 0 for a class that this client has no row of: (classes,)."""
        labels = self.train_table.labels
        if labels.ndim > 1:
            raise UserError("client.class_weights=true needs one label for each row: set it to false here.")
        labels = labels[index.to(labels.device)]
        counts = torch.bincount(labels, minlength=len(self.corpus.classes))
        weights = len(index) / (len(self.corpus.classes) * counts)
        return torch.where(counts > 0, weights, 0.0).to(self.dtype)

    def client_test_rows(self, client: str) -> Table:
        """The test rows of one client: its share, or all that a site has."""
        if not self.shares.test:
            return self.test_table
        return self.test_table.take(self.shares.test[int(client)])

    def client_test_index(self, client: str) -> np.ndarray:
        """The numbers of these rows in the test table."""
        return self.shares.test[int(client)] if self.shares.test else np.arange(len(self.test_table))


def augments(config: Config) -> bool:
    return config.dataset.augment != "none"
