"""What a site shows of itself: as its policy says, nothing below the floor, and no text of anybody."""

import os
import re
import string
import urllib.error
import urllib.request
from threading import Thread

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.monitoring.audit_tail import STATES
from fedfrozen_app.monitoring.endpoint import make_endpoint
from fedfrozen_app.monitoring.families import ACTIVITY, SITE, Collected
from fedfrozen_app.monitoring.site_parts import process_state
from fedfrozen_app.sites.audit_log import COUNTED
from tests.monitoring.kits import (
    make_kit,
    of_the_site,
    read,
    samples,
    sent,
    source,
    write_budget,
    write_events,
    write_policy,
)

FLOOR = 10
WHY = ("refused", "failed", "declined")  # events that differ in what the site's rows are like
quick = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_by_hand(tmp_path):
    kit = make_kit(tmp_path / "kit")
    write_events(kit, [sent(120), sent(120, again=True), sent(130, round=2, order="p"), {"event": "lacks"}])
    write_budget(kit, 1.25)
    found = samples(read(kit))
    assert found["fedfrozen_site_rounds_total"] == 2
    assert found['fedfrozen_site_replies_total{state="sent"}'] == 2
    assert found['fedfrozen_site_replies_total{state="sent again"}'] == 1
    assert found['fedfrozen_site_replies_total{state="arrays asked for"}'] == 1
    assert found["fedfrozen_site_examples"] == 130
    assert found["fedfrozen_site_epsilon_spent"] == 1.25 and found["fedfrozen_site_epsilon_left"] == 1.75
    assert found["fedfrozen_site_record_sound"] == 1 and found["fedfrozen_site_version_refused"] == 0
    assert found['fedfrozen_site_up{part="executor"}'] == 0


def test_a_reader_of_openmetrics_takes_it(tmp_path):
    kit = make_kit(tmp_path / "kit")
    write_events(kit, [sent()])
    families = {family.name: family for family in text_string_to_metric_families(read(kit))}
    assert (
        families["fedfrozen_site_rounds"].type == "counter" and families["fedfrozen_site_up"].type == "gauge"
    )
    assert families.keys() <= SITE.keys()
    assert "fedfrozen_site_up" in read(kit, accept="")  # Prometheus's older text


@pytest.mark.parametrize("monitoring", ["none", "health", "activity"])
def test_the_policy_says_what_is_shown(tmp_path, monitoring):
    kit = make_kit(tmp_path / "kit", monitoring=monitoring)
    write_events(kit, [sent()])
    write_budget(kit, 1.0)
    if monitoring == "none":
        with pytest.raises(UserError, match="monitoring: none"):
            read(kit)
        return
    names = {name.partition("{")[0].removesuffix("_total") for name in samples(read(kit))}
    activity = {name for name, family in SITE.items() if family.level == ACTIVITY}
    assert names & activity == (activity & names if monitoring == "activity" else set())
    assert ("fedfrozen_site_epsilon_spent" in names) == (monitoring == "activity")


def test_a_change_of_the_policy_counts_from_the_next_scrape_on(tmp_path):
    kit = make_kit(tmp_path / "kit")
    one = source(kit)
    one.collect()
    write_policy(kit.folder, monitoring="none")
    with pytest.raises(UserError):
        one.collect()
    (kit.folder / "policy.yaml").write_text("{")  # a policy that cannot be read allows nothing
    with pytest.raises(UserError, match="valid YAML"):
        one.collect()


def test_a_bundle_that_the_policy_does_not_allow(tmp_path):
    kit = make_kit(tmp_path / "kit")
    write_events(kit, [{"event": "refused", "bundle": "a" * 64, "reason": "the bundle aaaa is not allowed"}])
    assert samples(read(kit))["fedfrozen_site_version_refused"] == 1
    write_policy(kit.folder, bundles=["a" * 64])
    assert samples(read(kit))["fedfrozen_site_version_refused"] == 0


def test_a_log_that_was_changed_or_grows(tmp_path):
    kit = make_kit(tmp_path / "kit")
    write_events(kit, [sent()])
    one = source(kit)
    one.collect()
    with kit.audit.open("a") as file:
        file.write('{"event": "sent", "exam')  # being written
    one.collect()
    assert one.tail.rounds == 1 and one.tail.sound
    with kit.audit.open("a") as file:
        file.write('ples": 3}\n')
    one.collect()
    assert not one.tail.sound and one.tail.rounds == 1


# What cannot be told from a scrape ------------------------------------------------------------------------

counts = st.integers(0, FLOOR - 1)
words = st.text(string.ascii_letters + string.digits + ' "{}\\\n<>', min_size=6, max_size=30)
few = st.fixed_dictionaries(
    {"examples": counts, "why": st.sampled_from(WHY), "text": words, "value": st.floats(0, 9)}
)


def life(one: dict) -> list[dict]:
    """A site's log, in which these are about fewer people than the floor, or are somebody's words."""
    return [
        sent(one["examples"], metrics={"train_loss": one["value"]}, run="run"),
        {"event": one["why"], "reason": f"{one['examples']} people, {one['text']}", "bundle": "b" * 64},
        {"event": "census", "run": one["text"], "proposal": "c" * 64, "counts": [one["examples"]]},
    ]


@quick
@given(few, few)
def test_sites_that_differ_below_the_floor_show_the_same(tmp_path_factory, first, second):
    shown = []
    for number, one in enumerate((first, second)):
        kit = make_kit(tmp_path_factory.mktemp("sites") / str(number))
        write_events(kit, life(one))
        write_budget(kit, 0.5)
        shown.append(of_the_site(read(kit)))
    assert shown[0] == shown[1]


@quick
@given(st.lists(st.one_of(counts, st.integers(FLOOR, 500)), min_size=1, max_size=6), st.integers(3, 200))
def test_no_number_of_rows_below_the_policy_s_floor(tmp_path_factory, told, floor):
    kit = make_kit(tmp_path_factory.mktemp("site") / "kit", census_floor=floor)
    write_events(
        kit, [sent(examples, round=number, order=str(number)) for number, examples in enumerate(told)]
    )
    found = samples(read(kit)).get("fedfrozen_site_examples")
    assert found == (told[-1] if told[-1] >= floor else None)


@quick
@given(words)
def test_nobody_s_words_are_shown(tmp_path_factory, text):
    kit = make_kit(tmp_path_factory.mktemp("site") / "kit")
    write_events(kit, life({"examples": 40, "why": "failed", "text": text, "value": 0.1}))
    names = r"[a-z_]+(\{[a-z]+=\"[a-z ]*\"\})? [0-9.e+-]+"
    for line in read(kit).splitlines():
        assert line.startswith("#") or re.fullmatch(names, line), line
        assert text.strip() not in line or text.strip() == "" or line.startswith("#")


def test_every_event_of_the_log_has_a_state_of_ours():
    """An event with another name is not shown, and a refusal cannot be told from a failure."""
    assert set(COUNTED) - {"again"} <= STATES.keys()
    assert {STATES[event] for event in WHY} == {"refused"}


def test_what_is_not_declared_is_not_shown():
    with pytest.raises(KeyError):
        Collected(SITE).add("fedfrozen_site_rows", 3)


# The endpoint ---------------------------------------------------------------------------------------------


def ask(address: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_endpoint_answers_this_machine_alone(tmp_path):
    kit = make_kit(tmp_path / "kit")
    with make_endpoint(source(kit), 0) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            assert server.server_address[0] == "127.0.0.1"
            code, text = ask(f"{address}/metrics")
            assert code == 200 and "fedfrozen_site_up" in text
            assert ask(f"{address}/metrics", Host="evil.example")[0] == 403
            assert ask(f"{address}/../policy.yaml")[0] == 404
            write_policy(kit.folder, monitoring="none")
            code, text = ask(f"{address}/metrics")
            assert code == 503 and "monitoring: none" in text
        finally:
            server.shutdown()
            thread.join()


def test_a_port_that_is_taken(tmp_path):
    kit = make_kit(tmp_path / "kit")
    with make_endpoint(source(kit), 0) as server, pytest.raises(UserError, match="cannot be used"):
        make_endpoint(source(kit), server.server_port)


def test_a_process_that_is_not_ours_is_not_a_running_part():
    assert process_state(os.getpid(), "no such word") is None and process_state(2**22 + 5, "exec") is None
