"""What stays loaded in a process between messages: the model, the data, the arrays held.

One process keeps one of these. A Ray worker or a site answers every message of a run with it, so nothing is
rebuilt or read again between rounds.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.supercore.utils import get_flwr_home
from torch import Tensor

from fedfrozen_app.config import ClientConfig, Config, compose_config, device_of, read, resolved
from fedfrozen_app.data.augment import taken
from fedfrozen_app.data.federated import ClientRows, Shares, client_rows, load_corpus, share_out
from fedfrozen_app.data.partition_noise import with_noise
from fedfrozen_app.data.sources import needs_path
from fedfrozen_app.data.table import Corpus, Table
from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.cache import Cache
from fedfrozen_app.local.compiling import Compiling
from fedfrozen_app.local.parts import rounded_names
from fedfrozen_app.logs import prepare_logging
from fedfrozen_app.models.blocks import Blocks
from fedfrozen_app.models.build import parameters_of
from fedfrozen_app.models.folds import is_fold
from fedfrozen_app.models.meanwhile import judging
from fedfrozen_app.models.metrics import measure
from fedfrozen_app.models.own_weights import OwnWeights
from fedfrozen_app.models.roles import head_of, roles_of
from fedfrozen_app.models.task import Batch, Inputs, Task
from fedfrozen_app.models.wrapper import Wrapper, wrapper_of

log = logging.getLogger(__name__)


class Resident:
    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        *,
        shares: Shares,
        cache: Cache | None = None,
        card: Mapping[str, Any] | None = None,
        beside: "Resident | None" = None,
        device: torch.device | None = None,
    ) -> None:
        """`card` is what the federation has agreed on (classes, normalisation); None: this node's own.
        `beside`: of a run of the same shape in this process, whose data on the device are these too.
        `device`: in place of the one that `device` names."""
        if config.runtime.threads is not None:
            torch.set_num_threads(config.runtime.threads)
        torch.set_float32_matmul_precision("high" if config.client.precision == "tf32" else "highest")
        self.config = config
        self.device = device or device_of(config.device)
        self.alone = True  # in this process: nobody else records steps meanwhile
        self.corpus = corpus
        self.shares = shares
        self.cache = cache or Cache()
        self._own_caches: dict[str, Cache] = {}  # of clients in this process whose arrays are not the others'
        self.wrapper = wrapper_of(config)
        self.card = make_card(corpus, config, self.wrapper)
        lacks = False
        if card:
            self.wrapper.check_card(self.card, card)
            lacks = self.wrapper.lacks(self.card, card)
            self.card = dict(card)
        self.model = self._build().to(self.device)
        self.roles = roles_of(self.model)
        self.parameters = dict(self.model.named_parameters())
        self._fixed = self.wrapper.fixed_names(self.model)
        self.lacking = self._fixed if lacks else frozenset()  # that orders must say and the server send
        self.task = Task(
            self.model,
            mean=tuple(self.card["mean"]),
            std=tuple(self.card["std"]),
            precision=config.client.precision,
            kind=corpus.task,
            classes=corpus.classes,
            loaded=self.parameters,
            head=head_of(self.model, self.roles),
        )
        self.wrapper.settle(self.model)
        noise = config.partition.noise
        self.train_table: Table = (
            self._on_device(with_noise(corpus.train, shares.partition, noise, config.seed))
            if beside is None
            else beside.train_table
        )
        self._test: Table = self._on_device(corpus.test) if beside is None else beside._test
        self._novel: Table | None = None
        if corpus.novel is not None:
            with self.wrapper.reading_classes(self.model, corpus.novel.classes):  # or it says why it cannot
                self._novel = self._on_device(corpus.novel.test)
        self._rows: dict[str, ClientRows] = {}
        self._loaded: dict[str, str | None] = {}
        self.laid_out: Any = None  # of local/cohort.py: the batches of a round that is to come
        self.begun: Any = None  # of the same: its work, where that was begun before its order came
        self.recorder: Any = None  # of local/captured.py, which keeps a recorded step between messages
        self.outputs: int | None = None  # of the model's parts for one example, once counted
        self.compiling = Compiling()
        self.cohort: Any = None  # of inprocess/runtime.py: the cohort runner, which keeps a compiled step
        self.private_bytes: dict[Any, int] = {}  # of local/private_stack.py: a client's, by what trains
        self.private_sums: dict[Any, Any] = {}  # of local/private_sums.py: recorded steps, by their kind
        self.private_pool: Any = None  # and the memory in which they work
        self.private_noise: Any = None  # of local/private_noise.py: threads that draw it
        self.records_private = True  # until one of them could not be recorded

    @cached_property
    def blocks(self) -> Blocks:
        """The model's repeated blocks, and what was compiled for them."""
        return Blocks(self.model)

    @cached_property
    def own_weights(self) -> OwnWeights:
        """The kernels for layers of which every client has its own."""
        return OwnWeights(self.model, self.device, torch.bfloat16 if self.task.bf16 else torch.float32)

    @cached_property
    def rounded(self) -> frozenset[str]:
        """The parameters that training in bf16 rounds wherever it reads them."""
        return rounded_names(self.model, self.call_once) if self.task.bf16 else frozenset()

    @torch.no_grad()
    def call_once(self) -> None:
        """The model as it trains, but for dropout, on one row: for those who look at how it computes."""
        row = {name: value[:1] for name, value in self.train_table.inputs.items()}
        with judging(self.model):
            self.task.logits(self.parameters, Batch(row, self.train_table.labels[:1]))

    def can_switch_to(self, config: Config) -> bool:
        """Whether that run has this model, these data and this local training."""
        return wrapper_of(config) == self.wrapper and same_shape(config, self.config)

    def switch_to(self, config: Config, shares: Shares) -> None:
        """Serve another run, of another seed or partition, from its beginning; what is compiled stays."""
        if not self.can_switch_to(config):
            raise ValueError("a resident cannot switch to a run of another model, dataset or local training")
        self.config, self.shares, self.cache = config, shares, Cache()
        self._rows, self._loaded, self.laid_out, self.begun = {}, {}, None, None
        self.compiling = Compiling()
        self.load(self.initial(), {})

    def _build(self) -> torch.nn.Module:
        return self.wrapper.build(self.config, self.corpus)

    def _on_device(self, table: Table) -> Table:
        """On the device; pictures whose features training cannot change are read once, here."""
        table = table.to(self.device)
        features = self.wrapper.features(self.model)
        if features is None:
            return table
        if self.augments:
            raise UserError(
                f"dataset.augment={self.config.dataset.augment} makes other pictures in every round, and the "
                "features of this model's frozen encoder are read once: set dataset.augment=none."
            )
        return self.task.encoded(table, features)

    @property
    def exchanged(self) -> dict[str, Tensor]:
        """The parameters that server and clients exchange: all but those that each loads for itself."""
        return {name: value for name, value in self.parameters.items() if name not in self._fixed}

    def initial(self) -> dict[str, Tensor]:
        """The parameters as they were built: where a run, or a client's private part, starts."""
        built = parameters_of(self._build()).items()
        return {name: value.to(self.device) for name, value in built if name not in self._fixed}

    def cache_of(self, client: str) -> Cache:
        """What this client holds. A cache in memory has room for one base: where clients differ in rank,
        each that does has one of its own."""
        if self.cache.on_disk or client not in map(str, self.config.adapter.ranks):
            return self.cache
        return self._own_caches.setdefault(client, Cache())

    # Parameters ----------------------------------------------------------------------------------------

    def load(self, arrays: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
        """Put these values into the model; those that are in it already, by digest, are left alone."""
        self.fold(arrays)
        wanted = {name: digests.get(name) for name in arrays if not is_fold(name)}
        new = [name for name, digest in wanted.items() if digest is None or self._loaded.get(name) != digest]
        if new:
            self.mark_changed(new)  # also where the copy fails
            with torch.no_grad():
                torch._foreach_copy_([self.parameters[name] for name in new], [arrays[name] for name in new])
        self._loaded |= wanted

    def fold(self, arrays: Mapping[str, Tensor]) -> None:
        """Of these arrays, those that add to the model's fixed weights; what is on them already is left."""
        if folds := {name: value for name, value in arrays.items() if is_fold(name)}:
            self.wrapper.fold(self.model, folds)

    def fitted(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same, where the wrapper lets a client have smaller parameters: as large as the model's."""
        shapes = {name: value.shape for name, value in self.parameters.items()}
        return {
            name: value
            if value.shape == shapes.get(name, value.shape)
            else self.wrapper.widened(name, value, shapes[name])
            for name, value in arrays.items()
        }

    def cut_to(self, arrays: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse, for what is sent: each as large as it came."""
        return {
            name: value
            if name not in like or value.shape == like[name].shape
            else self.wrapper.narrowed(name, value, like[name].shape)
            for name, value in arrays.items()
        }

    def foundation(self) -> dict[str, Tensor]:
        """The fixed parameters as they were loaded, for a client whose own are others."""
        return self.wrapper.fixed_values(self.model)

    def mark_changed(self, names: Iterable[str]) -> None:
        """These are about to change: the next client must load them again."""
        for name in names:
            self._loaded[name] = None

    # Data ----------------------------------------------------------------------------------------------

    def rows(self, client: str) -> ClientRows:
        """A client's row numbers, on the host: batches are drawn there and sent over together."""
        if client not in self._rows:
            parts = self.shares.partition
            rows = np.arange(len(self.train_table)) if parts is None else parts.indices[int(client)]
            # A site's rows are its own choice: no seed of the server's decides which it holds out.
            seed = self.config.dataset.split_seed if parts is None else self.config.seed
            self._rows[client] = client_rows(rows, self.corpus, self.config, client, seed)
        return self._rows[client]

    @property
    def augments(self) -> bool:
        """Whether training pictures are shifted and flipped."""
        return self.config.dataset.augment != "none"

    def take(self, numbers: Tensor) -> tuple[Inputs, Tensor]:
        """The examples that a client drew for a step of its training."""
        table = self.train_table
        return taken(table.inputs, table.labels, numbers, augmented=self.augments)

    def class_weights(self, index: Tensor) -> Tensor:
        """n / (classes · count), and 0 for a class this client has never seen: (classes,)."""
        if self.train_table.labels.ndim > 1:
            raise UserError("client.class_weights=true needs one label for each row: set it to false here.")
        labels = self.train_table.labels[index.to(self.device)]
        counts = torch.bincount(labels, minlength=len(self.corpus.classes))
        weights = len(index) / (len(self.corpus.classes) * counts)
        return torch.where(counts > 0, weights, 0.0).to(self.task.dtype)

    # Judging -------------------------------------------------------------------------------------------

    def evaluates_after(self, server_round: int) -> bool:
        return server_round % self.config.eval_every == 0 or server_round == self.config.num_rounds

    @property
    def has_global(self) -> bool:
        """Whether what is shared makes a model that can be judged without any client's private part."""
        return self.wrapper.has_global

    def only_global(self) -> AbstractContextManager[None]:
        """Within it the model is what the server knows of it."""
        return self.wrapper.only_global(self.model)

    def figures(self) -> dict[str, float]:
        """What the model reports of itself beside its loss."""
        return self.wrapper.figures(self.model)

    def export(self, folder: Path, *, merged: bool = True) -> None:
        """The model as it is loaded, as a folder for transformers' `from_pretrained`."""
        self.wrapper.export(self.model, folder, self.corpus.classes, merged=merged)

    def client_test_rows(self, client: str) -> Table:
        """The test rows of one client: its share, or all that a site has."""
        if not self.shares.test:
            return self._test
        return self._test.take(self.shares.test[int(client)])

    def client_test_index(self, client: str) -> np.ndarray:
        """Their numbers in the test table."""
        return self.shares.test[int(client)] if self.shares.test else np.arange(len(self._test))

    @property
    def test_table(self) -> Table:
        """All test rows, on the device."""
        return self._test

    def judge_personal(self, client: str, *, shares_model: bool = False) -> dict[str, float]:
        """A client's personal model as it is loaded: on its own test rows, and where the server has no model
        of its own to judge, on the whole test set."""
        test_rows = self.client_test_rows(client)
        found = (
            {f"personal_{k}": v for k, v in self.task.evaluate(test_rows).items()} if len(test_rows) else {}
        )
        if not (shares_model or self.has_global) and len(self._test):
            found |= {f"test_{key}": value for key, value in self.evaluate_test().items()}
        return found

    def evaluate_rows(self, index: Tensor) -> dict[str, float]:
        return self.task.evaluate(self.train_table.take(index))

    def judge_validation(self, client: str, when: str) -> dict[str, float]:
        """The model as it is loaded, on the rows that the client holds out; empty where it holds none out."""
        rows = self.rows(client).validation
        if not len(rows):
            return {}
        return self._validated(when, self.evaluate_rows(rows))

    def judge_validations(
        self, clients: Sequence[str], when: str, said: Callable[[list[Tensor]], list[Tensor]]
    ) -> dict[str, dict[str, float]]:
        """The same for all of these that hold rows out, by client. `said`: what their models say of the rows
        of each, which looks at the device once for all."""
        if not self.config.dataset.client_validation:  # nobody does
            return {}
        rows = [self.rows(client).validation for client in clients]
        lengths = [own.numel() for own in rows]
        if not any(lengths):
            return {}
        labels = self.train_table.labels[torch.cat(rows).to(self.device)].cpu().split(lengths)
        task = self.task
        return {
            client: self._validated(when, measure(task.kind, its, true, task.classes))
            for client, its, true in zip(clients, said(rows), labels, strict=True)
            if len(true)
        }

    def _validated(self, when: str, found: Mapping[str, float]) -> dict[str, float]:
        counts = {"client_val_tokens": found["tokens"]} if "tokens" in found else {}
        return {f"client_val_{when}": found[self.task.headline], **counts}

    def said_of(self, rows: list[Tensor]) -> list[Tensor]:
        """What the model as it is loaded says of each of these rows, on the host."""
        table = self.train_table.take(torch.cat(rows))
        _, said = self.task.predict(table, self.task.rows_at_once(table))
        return list(said.cpu().split([len(own) for own in rows]))

    def evaluate_test(self) -> dict[str, float]:
        return self.task.evaluate(self._test)

    @property
    def has_novel(self) -> bool:
        """Whether there are classes that nobody trains on."""
        return self._novel is not None

    def evaluate_novel(self) -> dict[str, float]:
        """Among the classes that nobody trained on; empty where there are none."""
        if self.corpus.novel is None or self._novel is None:
            return {}
        with self.wrapper.reading_classes(self.model, self.corpus.novel.classes):
            return self.task.evaluate(self._novel)

    def evaluate_validation(self) -> dict[str, float]:
        """On the rows the server keeps; empty where it keeps none."""
        if not len(self.shares.validation):
            return {}
        return self.evaluate_rows(torch.from_numpy(self.shares.validation).to(self.device))


def same_shape(one: Config, other: Config) -> bool:
    """Whether two runs have the same model, data and local training: seed, partition and rate may differ."""
    wrapper = wrapper_of(one)
    if not wrapper.reusable or wrapper_of(other) != wrapper:
        return False
    if one.partition.noise or other.partition.noise:  # then the rows themselves differ
        return False
    parts = ("model", "dataset", "runtime", "device")
    same = all(getattr(one, part) == getattr(other, part) for part in parts)
    return same and _but_for_rate(one.client) == _but_for_rate(other.client)


def _but_for_rate(settings: ClientConfig) -> ClientConfig:
    """A step is given its rate every round; where some parts have their own, their ratio is built in."""
    if settings.head_lr is not None or settings.fusion_lr is not None:
        return settings
    return replace(settings, lr=1.0, lr_schedule="constant", lr_final=0.0)


def make_card(corpus: Corpus, config: Config, wrapper: Wrapper | None = None) -> dict[str, Any]:
    """What every client must agree on to read its data, and its model, as the others do."""
    card = {"classes": list(corpus.classes), "mean": list(corpus.mean), "std": list(corpus.std)}
    return card | (wrapper or wrapper_of(config)).card(config, corpus)


@dataclass(frozen=True)
class Told:
    """What a site with an executor trains: made of an accepted proposal and the site's own view."""

    site: str
    proposal: str  # hash
    config: Config
    card: Mapping[str, Any]


RunKey = tuple[Any, ...]
_installed: tuple[RunKey, Resident] | None = None
_told: dict[str, Told] = {}  # by site: of a process there is one, of a test's several


def tell(told: Told) -> None:
    """What the next message of this site is about; the executor's word, and nobody else's."""
    _told[told.site] = told


def install(key: RunKey, resident: Resident) -> None:
    """Make this the process's resident, for contexts whose run has this key."""
    global _installed
    _installed = (key, resident)


def installed() -> tuple[RunKey, Resident]:
    assert _installed is not None
    return _installed


def run_key(context: Context) -> RunKey:
    node = context.node_config
    if "executor" in node:
        return ("proposal", node["site"], node["proposal"])
    where = (node.get("site"), node.get("data-path"), node.get("num-partitions"))
    return (context.run_config["overrides"], *where)


def resident_for(context: Context) -> Resident:
    """The process's resident for this run; built at the first message, kept for all others."""
    key = run_key(context)
    if _installed is None or _installed[0] != key:
        install(key, _build_for(context))
    assert _installed is not None
    return _installed[1]


@lru_cache(maxsize=1)
def config_of(overrides: str) -> Config:
    return read(resolved(compose_config(overrides)))


def _build_for(context: Context) -> Resident:
    prepare_logging()  # a worker's or a site's process begins without it
    if "executor" in context.node_config:
        return _build_told(context)
    config = config_of(str(context.run_config["overrides"]))
    node = context.node_config
    path = node.get("data-path")
    if "model-path" in node:
        config = replace(config, model=replace(config.model, path=str(node["model-path"])))
    if path is None and needs_path(config.dataset.kind) and not simulated():
        raise UserError(
            "This node names no data of its own: start its SuperNode with "
            "--node-config 'data-path=\"/folder/of/this/site\"'."
        )
    card = json.loads(str(context.state["card"]["json"]))
    local_path = None if path is None else str(path)
    corpus = load_corpus(config, local_path, tuple(card["classes"]), site="site" in node)
    if "site" in node:
        shares = Shares(validation=np.arange(0))
    else:
        shares = share_out(corpus, config, int(node["num-partitions"]))
    resident = Resident(config, corpus, cache=disk_cache(context), shares=shares, card=card)
    log.info("Worker %d trains on %s and keeps its model and data loaded.", os.getpid(), resident.device)
    return resident


def _build_told(context: Context) -> Resident:
    """Nothing is composed: the configuration is the object that was judged."""
    node = context.node_config
    told = _told[str(node["site"])]
    if told.proposal != node["proposal"]:
        raise ValueError("the site was told of another proposal")
    config, card = told.config, dict(told.card)
    corpus = load_corpus(config, None, tuple(card["classes"]), site=True)
    shares = Shares(validation=np.arange(0))
    resident = Resident(config, corpus, cache=disk_cache(context), shares=shares, card=card)
    log.info("Worker %d trains on %s and keeps its model and data loaded.", os.getpid(), resident.device)
    return resident


def disk_cache(context: Context) -> Cache:
    """Where this machine keeps arrays between processes. A site names its own folder; a server never does."""
    node = context.node_config
    if "executor" in node:
        return Cache(Path(str(node["cache-dir"])), limit_bytes=int(float(node["cache-gb"]) * 1e9))
    runtime = config_of(str(context.run_config["overrides"])).runtime
    named = context.node_config.get("cache-dir") if "site" in context.node_config else runtime.cache_dir
    folder = Path(str(named)) if named else get_flwr_home() / "fedfrozen" / "cache"
    room = float(context.node_config.get("cache-gb", runtime.cache_gb))
    return Cache(folder, limit_bytes=int(room * 1e9))


def simulated() -> bool:
    """Whether this is a process of Flower's simulation, where run and data are the same person's."""
    ray = sys.modules.get("ray")  # Flower imports it there, and nowhere else
    return ray is not None and ray.is_initialized()
