import pytest

from tests.desk.steward import make_kit, open_desk
from tests.report.browser import chromium

__all__ = ["chromium"]  # a fixture, once for all modules: one process has one Playwright


@pytest.fixture
def kit(tmp_path):
    return make_kit(tmp_path / "north")


@pytest.fixture
def browser(kit):
    return open_desk(kit)
