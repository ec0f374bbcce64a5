"""One bar over all runs of a sweep, and the time that is left of all."""

import io

from fedfrozen_app.report.console import Progress
from fedfrozen_app.report.sweep_clock import SweepClock, over_all_runs, run_ended
from fedfrozen_app.sweep.multirun import how_many


def test_the_time_left_is_that_of_all_runs_and_kept_ones_cost_none():
    seconds = iter([0.0, 10.0, 30.0, 40.0])
    clock = SweepClock(4, now=lambda: next(seconds))
    clock.finish(kept=True)
    assert clock.place() == "run 2/4"
    assert clock.left(0.5) == 10 / 0.5 * 2.5  # half a run in 10 s, two and a half to go
    clock.finish()
    assert clock.left(0.0) == 30 / 1 * 2
    clock.finish()
    clock.finish()
    assert clock.left(0.0) == 0.0 and clock.place() == "run 4/4"


def test_lines_name_the_run(monkeypatch):
    monkeypatch.setattr(SweepClock, "left", lambda self, share: 90.0)
    stream = io.StringIO()
    with over_all_runs(3):
        run_ended(kept=True)
        with Progress(2, stream=stream) as progress:
            progress.update({"round": 1, "stage": "train"})
    run_ended()  # outside of a sweep: nothing
    assert stream.getvalue() == "run 2/3 round 1/2  train  about 1 min 30 s left of all\n"


def test_the_bar_goes_over_all_runs(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    with over_all_runs(4):
        run_ended()
        bar = Progress(10, stream=Terminal())
        assert bar._bar is not None
        (task,) = bar._bar.tasks
        assert (task.total, task.completed) == (40, 10)
        bar.update({"round": 3, "stage": "train"})
        assert task.completed == 13 and task.fields["place"] == "run 2/4 round 3/10"


def test_how_many_runs_words_ask_for():
    assert how_many(["strategy=fedavg,fedprox", "seed=0,1,2", "num_rounds=3", "client.lr=range(1,4)"]) == 18
    assert how_many(["seed=0"]) == 1
