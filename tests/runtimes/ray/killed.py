"""Runs on real Ray workers, which may be killed while they train."""

import os
import signal

import ray

from fedfrozen_app.runtimes.ray.pool import ActorPool


def shut_down():
    """End Ray, which would otherwise last as long as the process of the tests."""
    handler = signal.getsignal(signal.SIGTERM)
    ray.shutdown()
    signal.signal(signal.SIGTERM, handler)
    for name in ("RAY_ADDRESS", "RAY_USAGE_STATS_ENABLED"):
        os.environ.pop(name, None)


def killing(monkeypatch, after, kill):
    """Call `kill` with the actor that has just been given the part number `after` of the run."""
    given, real = [], ActorPool._give

    def give(pool, part, actor):
        real(pool, part, actor)
        given.append(actor)
        if len(given) == after:
            kill(actor)

    monkeypatch.setattr(ActorPool, "_give", give)
    return given


def kill_process(actor):
    os.kill(actor.place.process, signal.SIGKILL)
