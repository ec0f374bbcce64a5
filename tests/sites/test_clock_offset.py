"""What a SuperNode notes of its clock, for the metrics of a site whose server refuses it."""

import logging
import time
from email.utils import formatdate

import pytest

from fedfrozen_app.sites.clock_offset import LASTS, NAME, ClockFile, last_offset, offset_of


def test_the_last_offset_is_known_for_a_while(tmp_path, monkeypatch):
    assert last_offset(tmp_path) is None
    ClockFile(tmp_path).note(-2.5)
    assert last_offset(tmp_path) == -2.5
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + LASTS + 1)
    assert last_offset(tmp_path) is None
    monkeypatch.setattr(time, "monotonic", lambda: began - 1)  # the machine was started again
    assert last_offset(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[1]", '{"offset": 1}', '{"offset": null, "measured": 0}', "{"])
def test_a_damaged_file_says_nothing(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    assert last_offset(tmp_path) is None


@pytest.mark.parametrize(("offset", "words"), [(120.0, "120 s ahead of"), (-3600.0, "3600 s behind")])
def test_a_wrong_clock_is_one_sentence_in_the_log(tmp_path, caplog, offset, words):
    clock = ClockFile(tmp_path)
    with caplog.at_level(logging.ERROR):
        for drift in (0.0, 0.4, -0.7):  # dates have whole seconds
            clock.note(offset + drift)
    (record,) = caplog.records
    assert words in record.getMessage() and "NTP" in record.getMessage()
    assert last_offset(tmp_path) == offset
    clock.note(0.2)
    assert last_offset(tmp_path) == 0.2 and len(caplog.records) == 1


def test_the_date_of_an_answer_gives_the_offset():
    assert offset_of(formatdate(time.time() - 120, usegmt=True)) == pytest.approx(120, abs=2)
    assert offset_of(None) is None and offset_of("no date") is None
