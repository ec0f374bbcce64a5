"""The clients' data: tables on the device, and which rows belong to which client."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.config import Config
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.augment import taken
from fedfrozen_app.data.federated import ClientRows, Shares, client_rows
from fedfrozen_app.data.preprocessing import rescaled
from fedfrozen_app.data.table import Corpus, Table
from fedfrozen_app.models.task import Inputs

KEPT_CLIENTS = 20_000  # clients with cached row numbers


@dataclass(frozen=True)
class ClientData:
    """The rows of all clients of this process. A site has one client, with all rows."""

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
            if len(self._rows) >= KEPT_CLIENTS:  # with very many clients, cache those of the last rounds
                for old in list(self._rows)[: KEPT_CLIENTS // 2]:
                    del self._rows[old]
            parts = self.shares.partition
            rows = np.arange(len(self.train_table)) if parts is None else parts.indices[int(client)]
            # A site chooses its own held-out rows: the server's seed must not decide them.
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
        """n / (classes · count), and 0 for a class without rows at this client: (classes,)."""
        labels = self.train_table.labels
        if labels.ndim > 1 or labels.is_floating_point():
            raise UserError("client.class_weights=true needs one label for each row: set it to false here.")
        labels = labels[index.to(labels.device)]
        counts = torch.bincount(labels, minlength=len(self.corpus.classes))
        weights = len(index) / (len(self.corpus.classes) * counts)
        return torch.where(counts > 0, weights, 0.0).to(self.dtype)

    def client_test_rows(self, client: str) -> Table:
        """The test rows of one client: its share, or all of a site's; scaled like its training rows."""
        table = self.test_table.take(self.shares.test[int(client)]) if self.shares.test else self.test_table
        if not scales_by_client(self.config):
            return table
        like = self.corpus.train.inputs["numbers"][self.rows(client).train].to(table.labels.device)
        return rescaled_table(table, like, self.corpus)

    def client_test_index(self, client: str) -> np.ndarray:
        """The indices of these rows in the test table."""
        return self.shares.test[int(client)] if self.shares.test else np.arange(len(self.test_table))


def scales_by_client(config: Config) -> bool:
    return config.dataset.kind == "table" and config.dataset.normalise == "site"


def scaled_by_client(table: Table, corpus: Corpus, shares: Shares, config: Config) -> Table:
    """The training table with each client's numeric columns standardised by the mean and deviation of its own
    training rows. The server's rows are unchanged. Returns the same table if this is not configured."""
    if not scales_by_client(config):
        return table
    clients = ["0"] if shares.partition is None else list(map(str, range(len(shares.partition.indices))))
    data = ClientData(config, corpus, shares, table, corpus.test, None, torch.float64)
    numbers = table.inputs["numbers"].clone()
    for client in clients:
        own = data.rows(client)
        like = table.inputs["numbers"][own.train]
        for rows in (own.train, own.validation):
            numbers[rows] = rescaled_table(table.take(rows), like, corpus).inputs["numbers"]
    return Table({**table.inputs, "numbers": numbers}, table.labels)


def rescaled_table(table: Table, like: Tensor, corpus: Corpus) -> Table:
    assert corpus.preprocessing is not None
    return Table(rescaled(table.inputs, like, len(corpus.preprocessing.numeric)), table.labels)


def augments(config: Config) -> bool:
    return config.dataset.augment != "none"
