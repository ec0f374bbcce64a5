"""A limit of a policy, set by the command: the rest of the file stays as it is."""

import pytest
import yaml

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.kit_templates import Filled
from fedfrozen_app.sites.limits import LIMITS, set_limit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.site_templates import POLICY_STRICT, POLICY_YAML


@pytest.fixture
def kit(tmp_path):
    """With the policy that a new site gets."""
    site = {"name": "north", "superlink": "x:1", "views": {"main": {"kind": "digits"}}, "folder": "var"}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    (tmp_path / "policy.yaml").write_text(
        Filled(POLICY_YAML).substitute(POLICY_STRICT | {"bundle": "b" * 64})
    )
    return Kit.read(tmp_path)


OTHERS = {
    "approval": "policy",
    "privacy_required": "false",
    "monitoring": "health",
    "min_threshold": "0.7",
    "secure_aggregation": "required",
    "max_delta": "1e-6",
}


@pytest.mark.parametrize("key", LIMITS)
def test_every_limit_of_a_new_site_s_policy(kit, key):
    before, lines = Policy.read(kit.policy), kit.policy.read_text().splitlines()
    set_limit(kit, key, OTHERS.get(key, "17"))
    after = Policy.read(kit.policy)
    changed = [name for name in vars(before) if getattr(before, name) != getattr(after, name)]
    assert changed == [key]
    other = [
        line for line, old in zip(kit.policy.read_text().splitlines(), lines, strict=True) if line != old
    ]
    assert len(other) == 1 and other[0].startswith(f"{key}:")
    assert ("#" in other[0]) == ("#" in next(line for line in lines if line.startswith(f"{key}:")))


def test_a_key_that_the_file_leaves_out_is_added(kit):
    text = "\n".join(
        line for line in kit.policy.read_text().splitlines() if not line.startswith("min_cohort")
    )
    kit.policy.write_text(text)
    set_limit(kit, "min_cohort", "5")
    assert kit.policy.read_text() == text + "\nmin_cohort: 5\n"


@pytest.mark.parametrize("text", ["{}", "max_epsilon: [1", '"max_epsilon": 2.0\n'])
def test_a_file_that_this_cannot_change_stays(kit, text):
    if text.startswith('"'):
        text = kit.policy.read_text().replace("max_epsilon: 3.0", '"max_epsilon": 3.0')
    kit.policy.write_text(text)
    with pytest.raises(UserError):
        set_limit(kit, "max_epsilon", "2")
    assert kit.policy.read_text() == text and not list(kit.folder.glob(".policy*"))


def test_a_record_that_cannot_be_written_changes_nothing(kit):
    """A loosened limit that no record knows of would be worse than none."""
    kit.approvals.mkdir(parents=True)
    (kit.approvals / "decisions.jsonl").write_text("damaged\n")
    before = kit.policy.read_text()
    with pytest.raises(UserError, match="changed or cut"):
        set_limit(kit, "max_epsilon", "9")
    assert kit.policy.read_text() == before
