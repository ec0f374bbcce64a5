"""Alert rules, Prometheus's settings and the dashboard: as Prometheus's own tool reads them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fedfrozen_app.monitoring import dashboard
from fedfrozen_app.monitoring.families import SERVER, SITE
from fedfrozen_app.sites.kit_templates import MONITORING, Filled

HERE = Path(__file__).parent
NAME = re.compile(r"fedfrozen_[a-z_]+")
SHOWN = {f"{name}_total" if one.kind == "counter" else name for name, one in (SERVER | SITE).items()}


@pytest.fixture
def folder(tmp_path):
    """As in a kit."""
    values = dict.fromkeys(("name", "metrics_port"), "9470")
    for name, text in MONITORING.items():
        (tmp_path / name).write_text(Filled(text).substitute(values))
    return tmp_path


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")
def test_promtool_takes_all_of_them(folder):
    shutil.copy(HERE / "alerts_test.yml", folder)
    for words in (["check", "rules", "alerts.yml"], ["check", "config", "prometheus.yml"]):
        done = subprocess.run(["promtool", *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yml"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_ask_for_what_is_shown_and_say_what_to_do():
    groups = yaml.safe_load(MONITORING["alerts.yml"])["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 12
    for rule in rules:
        assert set(NAME.findall(rule["expr"])) <= SHOWN, rule["alert"]
        assert rule["annotations"].keys() == {"summary", "do"} and rule["labels"]["severity"]


def test_the_dashboard_is_fresh_and_asks_for_what_is_shown():
    assert MONITORING["dashboard.json"] == dashboard.generate()
    found = json.loads(MONITORING["dashboard.json"])
    queries = [target["expr"] for panel in found["panels"] for target in panel.get("targets", ())]
    assert len(queries) >= 20 and set(NAME.findall(" ".join(queries))) <= SHOWN
    assert len({panel["id"] for panel in found["panels"]}) == len(found["panels"])
