"""Studies made of many cells, in this process."""

import argparse
from pathlib import Path

import pytest

from fedfrozen_app.files import checkpoint
from fedfrozen_app.report import output
from fedfrozen_app.run import evaluation
from fedfrozen_app.runtimes.inprocess import concurrent_runs


@pytest.fixture
def cells(monkeypatch):
    """What the studies share, as a module; what it changes in the project is put back."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    patched = [(output, "write_curves"), (output, "write_report"), (evaluation, "draw_labels")]
    for place, name in (*patched, (checkpoint, "write"), (concurrent_runs, "share_out")):
        monkeypatch.setattr(place, name, getattr(place, name))
    import cells

    return cells


@pytest.fixture
def workers_here(cells, monkeypatch):
    """Workers that train in this process, at once: a new interpreter takes longer than a tiny study."""
    once = []  # it changes the project's functions: not twice over

    class Pipe:
        def __init__(self, measure, work, more):
            self.measure, self.work, self.more, self.laboratory, self.rows = measure, work, more, None, []

        def send(self, given):
            if self.laboratory is None:
                once[:] = once or [cells.Laboratory(given)]
                self.laboratory = once[0]
            else:
                self.rows.append(self.measure(given, self.laboratory, self.work, self.more))

        def recv(self):
            return self.rows.pop()

        def close(self):
            pass

    process = argparse.Namespace(terminate=lambda: None, join=lambda: None)
    monkeypatch.setattr(cells.Worker, "start", lambda *given: cells.Worker(process, Pipe(*given)))
    monkeypatch.setattr(cells, "wait", lambda pipes, timeout: pipes)
