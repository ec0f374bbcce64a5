"""A first-time steward's hour in a real browser, by mouse and by keyboard alone. `pytest -m slow`."""

import pytest

from fedfrozen_app.sites import decide
from fedfrozen_app.sites.kit import Kit
from tests.desk.trial import show, trial
from tests.desk.trial_site import SITE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("keyboard", [False, True])
def test_a_steward_s_first_hour_has_no_fault(chromium, tmp_path, keyboard):
    steward = trial(chromium, tmp_path, keyboard=keyboard)
    show(steward)
    assert steward.faults == []
    # Three minutes for both decisions, of which half a minute is left to a busy machine.
    assert sum(step.person for step in steward.decision) <= 150
    events = [
        (entry["event"], entry["what"])
        for entry in decide.decisions(Kit.read(tmp_path / "kits" / SITE))
        if "what" in entry
    ]
    assert events == [
        ("approved", "the run heart-pilot"),
        ("refused", "the run heart-3"),
        ("approved", "the run heart-2"),
        ("revoked", "the run heart-2"),
    ]
