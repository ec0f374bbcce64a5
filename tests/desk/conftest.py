import pytest

from tests.desk.steward import make_kit, open_desk


@pytest.fixture
def kit(tmp_path):
    return make_kit(tmp_path / "north")


@pytest.fixture
def browser(kit):
    return open_desk(kit)
