import pytest

from fedfrozen_app.config import compose_run
from fedfrozen_app.files import checkpoint
from fedfrozen_app.run.job import Job
from tests.conftest import SMALL, Run
from tests.runtimes.ray.inline import run_in_parts


@pytest.fixture
def in_parts(tmp_path, train):  # `train` leaves the pictures out
    """Train on inline workers with overrides on top of the small settings."""

    def run(*overrides, folder="parts", resume=False, **how):
        target = tmp_path / folder
        composed = compose_run([*SMALL, *overrides, "runtime=ray"])
        run_in_parts(Job(composed, target, checkpoint.newest(target) if resume else None), **how)
        return Run(target)

    return run
