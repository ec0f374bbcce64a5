"""Workers of a run without Ray: in this process, one after another, with everything pickled in between."""

import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace

from fedfrozen_app import client_app
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.runtimes.inprocess.runtime import run_with
from fedfrozen_app.runtimes.ray.part_trainer import PartTrainer
from fedfrozen_app.runtimes.ray.pool import Actor
from fedfrozen_app.runtimes.ray.ray_grid import RayGrid


@dataclass
class InlinePool:
    """As `ActorPool`. `order` says in which order parts train, `lost` which worker loses its first part."""

    trainers: list[PartTrainer]
    order: int = 1
    lost: int | None = None
    setup: SimpleNamespace = field(init=False)
    replies: list = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes of the arrays of each order

    def __post_init__(self):
        self.setup = SimpleNamespace(parts=len(self.trainers))
        self._queue = []
        self._actors = [Actor(n, self._handle(t), None, None) for n, t in enumerate(self.trainers)]

    def _handle(self, trainer):
        def train(order, common):
            sent = pickle.dumps((order, common))
            self.sizes.append(common.data.nbytes + order.own.data.nbytes)
            reply = trainer.train(*pickle.loads(sent))  # noqa: S301  (what this process has pickled)
            return pickle.loads(pickle.dumps(reply))  # noqa: S301

        return SimpleNamespace(train=SimpleNamespace(remote=train))

    def store(self, packed):
        return packed

    def submit(self, part):
        self._queue.append(part)

    def wait(self, part):
        for one in self._queue[:: self.order]:
            actor = self._actors[one.number % len(self._actors)]
            if self.lost == one.number:
                one.submit(actor)  # its reply never comes
                self.lost, others = None, [other for other in self._actors if other is not actor]
                actor.held, actor = frozenset(), others[0]
            one.reply = one.submit(actor)
            self.replies.append(one.reply)
        self._queue = []
        return part.reply

    def close(self):
        for trainer in self.trainers:
            trainer.close()


def run_in_parts(job, workers=2, pools=None, **how):
    """The run of this job with so many inline workers."""
    config = job.config
    corpus = load_corpus(config)

    def make_worker():
        return Worker(config, corpus, shares=share_out(corpus, config, config.num_clients))

    def make_grid(worker, clients, settings):
        trainers = [PartTrainer(make_worker(), clients, settings, workers) for _ in range(workers)]
        pool = InlinePool(trainers, **how)
        if pools is not None:
            pools.append(pool)
        return RayGrid(client_app.app, clients, settings, worker, pool)

    return run_with(make_worker(), job, make_grid=make_grid)
