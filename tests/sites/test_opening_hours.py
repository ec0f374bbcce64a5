"""`availability`: hours worked out by hand, what a policy may say, and a site that declines outside them."""

from datetime import datetime

import pytest
import yaml

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites.opening_hours import opens_at
from fedfrozen_app.sites.policy import Policy

NIGHTS = ("Mon-Fri 19:00-07:00",)
MONDAY = 16  # November 2026


def at(day: int, hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 11, day, hour, minute, 30)


@pytest.mark.parametrize(
    ("intervals", "now", "opens"),
    [
        ((), at(MONDAY, 12), None),  # always
        (NIGHTS, at(MONDAY, 18, 59), at(MONDAY, 19)),
        (NIGHTS, at(MONDAY, 19), None),
        (NIGHTS, at(MONDAY + 1, 6, 59), None),  # Monday's night
        (NIGHTS, at(MONDAY + 1, 7), at(MONDAY + 1, 19)),
        (NIGHTS, at(MONDAY, 6, 59), at(MONDAY, 19)),  # Sunday has no night
        (NIGHTS, at(MONDAY + 5, 6, 59), None),  # Friday's, on Saturday morning
        (NIGHTS, at(MONDAY + 5, 7), at(MONDAY + 7, 19)),  # over the weekend
        ((*NIGHTS, "Sat,Sun 00:00-24:00"), at(MONDAY + 6, 23, 59), None),
        ((*NIGHTS, "Sat,Sun 00:00-24:00"), at(MONDAY + 7, 0), at(MONDAY + 7, 19)),
        (("22:00-06:00",), at(MONDAY + 2, 6), at(MONDAY + 2, 22)),
        (("Sun-Mon 08:00-09:00",), at(MONDAY, 9), at(MONDAY + 6, 8)),  # over the end of the week
        (("Fri-Mon 08:00-09:00",), at(MONDAY, 8), None),
    ],
)
def test_when_a_site_opens(intervals, now, opens):
    found = opens_at(intervals, now)
    assert found == (None if opens is None else opens.replace(second=0))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("Mon-Fri 19:00-07:00", "it is no list of words"),
        (["nights"], "'nights' is no interval"),
        (["Mo 19:00-07:00"], "'Mo' names no days"),
        (["Mon 19:00-25:00"], "names no time of the day"),
        (["Mon 19:70-20:00"], "names no time of the day"),
        (["Mon 19:00-19:00"], "or none that passes"),
    ],
)
def test_a_policy_says_what_is_wrong_with_its_hours(tmp_path, value, problem):
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump({"availability": value} | needed()))
    with pytest.raises(UserError, match="availability: ") as error:
        Policy.read(path)
    assert problem in str(error.value) and "give intervals such as" in str(error.value)


def needed() -> dict:
    lists: dict = {key: [] for key in ("strategies", "upload_roles", "bundles")}
    return lists | dict.fromkeys(("min_examples", "rounds_per_day", "max_epsilon"), 1)


def test_without_hours_a_policy_is_as_before(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump(needed()))
    assert Policy.read(path).availability == ()
    path.write_text(yaml.safe_dump(needed() | {"availability": list(NIGHTS)}))
    assert Policy.read(path).availability == NIGHTS
