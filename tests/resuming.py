"""Runs that are killed and resumed, beside runs that were not."""

from contextlib import contextmanager

import pytest

from fedfrozen_app.handlers import train_handler
from fedfrozen_app.server import base
from tests.conftest import same_bits


class Killed(BaseException):
    """As SIGKILL would: no handler of ours may catch it and tidy up."""


@contextmanager
def killed_before_checkpoint(monkeypatch, server_round):
    """Within it the process dies when that round is over, before anything of it is on the disk."""
    real = base.close_round

    def dies(strategy, row, *rest):
        if row["round"] == server_round:
            raise Killed
        return real(strategy, row, *rest)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(base, "close_round", dies)
        yield


def kill_in_round(monkeypatch, server_round, how=KeyboardInterrupt):
    """Ctrl-C while the second client of that round trains, when one reply is already in the sum."""
    real, seen = train_handler.train_client, []

    def killed(worker, client, request, start, steps):
        seen.append(request.round)
        if seen.count(server_round) == 2:
            raise how
        return real(worker, client, request, start, steps)

    monkeypatch.setattr(train_handler, "train_client", killed)


def resumed_and_whole(train, monkeypatch, *words):
    """A run that was killed in its third round and resumed, and the unbroken one; their models and rows are
    the same."""
    whole = train(*words, folder="whole")
    kill_in_round(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        train(*words, folder="broken")
    monkeypatch.undo()
    resumed = train(*words, folder="broken", resume=True)
    assert same_bits(whole.model, resumed.model)
    assert [without_times(row) for row in resumed.rows] == [without_times(row) for row in whole.rows]
    return resumed, whole


def without_times(row):
    return {key: value for key, value in row.items() if key not in ("seconds", "client_seconds")}
