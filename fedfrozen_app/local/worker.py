"""A worker: the model on its device, the values loaded into it, and the clients' data.

One process keeps one worker (local/worker_for.py). It handles every message of a run, so that nothing is
rebuilt or read again between rounds.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfrozen_app.adapters.merged_deltas import is_merged_delta
from fedfrozen_app.config import Config, device_of
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.federated import ClientRows, Shares
from fedfrozen_app.data.partition_noise import with_noise
from fedfrozen_app.data.table import Corpus, Table
from fedfrozen_app.exchange.cache import Cache
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.local.client_data import ClientData, augments, scaled_by_client
from fedfrozen_app.local.kept import Kept
from fedfrozen_app.local.parts import rounded_names
from fedfrozen_app.local.reuse import same_shape
from fedfrozen_app.models.build import parameters_of
from fedfrozen_app.models.roles import head_of, roles_of
from fedfrozen_app.models.task import Batch, Inputs, Task
from fedfrozen_app.models.wrapper import Wrapper, wrapper_of
from fedfrozen_app.vmap.blocks import Blocks
from fedfrozen_app.vmap.model_modes import evaluation_mode
from fedfrozen_app.vmap.per_client_kernels import PerClientKernels


class RankCaches(dict[str, Cache]):
    """In-memory caches, one per client, of clients with their own adapter ranks."""


class Worker:
    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        *,
        shares: Shares,
        cache: Cache | None = None,
        data_spec: Mapping[str, Any] | None = None,
        tables_of: "Worker | None" = None,
    ) -> None:
        """`data_spec`: the federation's data format (classes, pixels, tokens); None: this node's own.
        `tables_of`: a worker of a run of the same shape in this process, to share its tables."""
        if config.runtime.threads is not None:
            torch.set_num_threads(config.runtime.threads)
        torch.set_float32_matmul_precision("high" if config.client.precision == "tf32" else "highest")
        self.config = config
        self.device = device_of(config.device)
        self.cache = cache or Cache()
        self.kept = Kept()
        self.wrapper = wrapper_of(config)
        self.data_spec = make_data_spec(corpus, config, self.wrapper)
        lacks = False
        if data_spec:
            self.wrapper.check_data_spec(self.data_spec, data_spec)
            lacks = self.wrapper.lacks(self.data_spec, data_spec)
            self.data_spec = dict(data_spec)
        self.model = self._build(corpus).to(self.device)
        fixed = self._fixed
        # Fixed names that this node cannot load itself: requests must contain them.
        self.lacking = fixed if lacks else frozenset()
        self.task = self._make_task(corpus)
        self.wrapper.settle(self.model)
        self.data: ClientData = self._load_data(corpus, shares, None if tables_of is None else tables_of.data)
        self._digests: dict[str, str | None] = {}  # of the loaded values, by name

    def _build(self, corpus: Corpus) -> torch.nn.Module:
        return self.wrapper.build(self.config, corpus)

    def _make_task(self, corpus: Corpus) -> Task:
        return Task(
            self.model,
            mean=tuple(self.data_spec["mean"]),
            std=tuple(self.data_spec["std"]),
            precision=self.config.client.precision,
            kind=corpus.task,
            settings=corpus.settings,
            classes=corpus.classes,
            loaded=self.parameters,
            head=head_of(self.model, self.roles),
        )

    def _load_data(self, corpus: Corpus, shares: Shares, same: ClientData | None) -> ClientData:
        config = self.config
        if same is None:
            noisy = with_noise(corpus.train, shares.partition, config.partition.noise, config.seed)
            scaled = scaled_by_client(noisy, corpus, shares, config)
            train, test = self._on_device(scaled), self._on_device(corpus.test)
        else:
            train, test = same.train_table, same.test_table
        novel: Table | None = None
        if corpus.novel is not None:
            with self.wrapper.reading_classes(self.model, corpus.novel.classes):  # raises if it cannot
                novel = self._on_device(corpus.novel.test)
        return ClientData(config, corpus, shares, train, test, novel, self.task.dtype)

    def _on_device(self, table: Table) -> Table:
        """The table on the device. Features of a frozen image encoder are computed here, once."""
        table = table.to(self.device)
        features = self.wrapper.features(self.model)
        if features is None:
            return table
        if augments(self.config):
            raise UserError(
                f"dataset.augment={self.config.dataset.augment} makes other pictures in every round, and the "
                "features of this model's frozen encoder are read once: set dataset.augment=none."
            )
        return self.task.encoded(table, features)

    def can_switch_to(self, config: Config) -> bool:
        """Whether that run has the same model, data and local training."""
        return wrapper_of(config) == self.wrapper and same_shape(config, self.config)

    def switch_to(self, config: Config, shares: Shares) -> None:
        """Switch to another run, with another seed or partition, at its beginning. Keeps compiled code."""
        if not self.can_switch_to(config):
            raise ValueError("a worker cannot switch to a run of another model, dataset or local training")
        self.config, self.data, self.cache = config, self.data.for_run(config, shares), Cache()
        self._digests = {}
        self.kept.end_run()
        self.load(self.initial(), {})

    def cache_of(self, client: str) -> Cache:
        """The cache of the arrays that this client holds. A cache in memory has room for one base, so clients
        with their own adapter ranks get separate caches."""
        if self.cache.on_disk or client not in map(str, self.config.adapter.ranks):
            return self.cache
        return self.kept.for_run(RankCaches).setdefault(client, Cache())

    # Data: short names for what an algorithm or a layer choice reads ---------------------------------------

    @property
    def corpus(self) -> Corpus:
        return self.data.corpus

    @property
    def shares(self) -> Shares:
        return self.data.shares

    @property
    def train_table(self) -> Table:
        return self.data.train_table

    def rows(self, client: str) -> ClientRows:
        return self.data.rows(client)

    def take(self, numbers: Tensor) -> tuple[Inputs, Tensor]:
        return self.data.take(numbers)

    # Parameters ----------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.model.named_parameters())

    @cached_property
    def roles(self) -> dict[str, Role]:
        return roles_of(self.model)

    @cached_property
    def _fixed(self) -> frozenset[str]:
        """The parameters that each node loads for itself."""
        return self.wrapper.fixed_names(self.model)

    @property
    def exchanged(self) -> dict[str, Tensor]:
        """The parameters that server and clients exchange: all except the fixed ones."""
        return {name: value for name, value in self.parameters.items() if name not in self._fixed}

    def marks(self) -> dict[str, str]:
        """Header entries for files with the run's arrays: they identify what the file lacks."""
        own = [one.marks() for one in (self.corpus.reading, self.corpus.preprocessing) if one is not None]
        return self.wrapper.marks() | {key: value for marks in own for key, value in marks.items()}

    def check_marks(self, marks: Mapping[str, str]) -> None:
        """Raise a `UserError` for a file that belongs to other fixed parameters or other tokens."""
        self.wrapper.check_marks(marks)
        for one in (self.corpus.reading, self.corpus.preprocessing):
            if one is not None:
                one.check_marks(marks)

    def initial(self) -> dict[str, Tensor]:
        """The initial parameters: the start of a run, or of a client's private part."""
        built = parameters_of(self._build(self.corpus)).items()
        return {name: value.to(self.device) for name, value in built if name not in self._fixed}

    def load(self, arrays: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
        """Load these values into the model, except those already loaded, by digest."""
        self.load_merged_deltas(arrays)
        wanted = {name: digests.get(name) for name in arrays if not is_merged_delta(name)}
        new = [name for name, digest in wanted.items() if digest is None or self._digests.get(name) != digest]
        if new:
            self.mark_changed(new)  # even if the copy fails
            with torch.no_grad():
                torch._foreach_copy_([self.parameters[name] for name in new], [arrays[name] for name in new])
        self._digests |= wanted

    def mark_changed(self, names: Iterable[str]) -> None:
        """Mark these as about to change: the next client must load them again."""
        for name in names:
            self._digests[name] = None

    def load_merged_deltas(self, arrays: Mapping[str, Tensor]) -> None:
        """Add the merged deltas among these arrays to the fixed weights, except those already added."""
        if merged_deltas := {name: value for name, value in arrays.items() if is_merged_delta(name)}:
            self.wrapper.apply_merged_deltas(self.model, merged_deltas)

    def fitted(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These arrays padded to the model's shapes, if the wrapper allows clients smaller parameters."""
        shapes = {name: value.shape for name, value in self.parameters.items()}
        return {
            name: value
            if value.shape == shapes.get(name, value.shape)
            else self.wrapper.widened(name, value, shapes[name])
            for name, value in arrays.items()
        }

    def cut_to(self, arrays: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse, for a reply: each array cut to the shape in which it was received."""
        return {
            name: value
            if name not in like or value.shape == like[name].shape
            else self.wrapper.narrowed(name, value, like[name].shape)
            for name, value in arrays.items()
        }

    def foundation(self) -> dict[str, Tensor]:
        """The fixed parameters as loaded, for a client that cannot load them."""
        return self.wrapper.fixed_values(self.model)

    # The model -----------------------------------------------------------------------------------------

    @property
    def has_global(self) -> bool:
        """Whether the shared parameters form a model that can be evaluated without private parts."""
        return self.wrapper.has_global

    def only_global(self) -> AbstractContextManager[None]:
        """Context in which the model consists of what the server knows."""
        return self.wrapper.only_global(self.model)

    def figures(self) -> dict[str, float]:
        """Metrics that the model reports in addition to its loss."""
        return self.wrapper.metrics(self.model)

    def export(self, folder: Path, *, merged: bool = True) -> None:
        """Export the loaded model as a folder for transformers' `from_pretrained`."""
        self.wrapper.export(self.model, folder, self.corpus.classes, merged=merged)

    @torch.no_grad()
    def call_once(self) -> None:
        """Call the model on one row as in training but without dropout, to trace its operations."""
        row = {name: value[:1] for name, value in self.train_table.inputs.items()}
        with evaluation_mode(self.model):
            self.task.logits(self.parameters, Batch(row, self.train_table.labels[:1]))

    @cached_property
    def rounded(self) -> frozenset[str]:
        """The parameters that bf16 training rounds at every read."""
        return rounded_names(self.model, self.call_once) if self.task.bf16 else frozenset()

    @cached_property
    def blocks(self) -> Blocks:
        """The model's repeated blocks, and their compiled code."""
        return Blocks(self.model)

    @cached_property
    def per_client_kernels(self) -> PerClientKernels:
        """The GPU kernels for layers in which every client has its own weights."""
        return PerClientKernels(self.model, self.device, torch.bfloat16 if self.task.bf16 else torch.float32)


def make_data_spec(corpus: Corpus, config: Config, wrapper: Wrapper | None = None) -> dict[str, Any]:
    """The data format that all clients must share, to read their data and the model in the same way."""
    return corpus.spec() | (wrapper or wrapper_of(config)).data_spec(config, corpus)
