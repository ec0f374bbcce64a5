"""Damaged tables: an error, or a warning that counts; never a silent change of the rows."""

import gzip
import json
import logging
import random

import pytest
from PIL import Image

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources import DatasetSpec
from fedfrozen_app.data.sources.load import load, prepare

ROWS = [(f"patient {n} had pain, then rest", "Heart" if n % 2 else "Lung") for n in range(60)]
HEAD = "text,label"


def table(rows=ROWS, head=HEAD, delimiter=","):
    return "".join([f"{head}\n", *(f'"{text}"{delimiter}{label}\n' for text, label in rows)])


def line(number, new, base=None):
    """The table with one line, counted from 1, replaced."""
    lines = (base or table()).split("\n")
    lines[number - 1] = new
    return "\n".join(lines)


def with_rows(*more):
    return table() + "".join(f"{row}\n" for row in more)


PLAIN = f"{HEAD}\n" + "".join(f"patient {n},{label}\n" for n, (_, label) in enumerate(ROWS))
DAMAGED = {
    "two unbalanced quotes": line(50, 'rest",Heart', line(10, '"pain,Heart')),
    "quotes that swallow rows": line(50, 'rest",Heart', line(10, '"pain', PLAIN)),
    "an open quote at the end": with_rows('"no end,Heart'),
    "an open quote in the middle": line(30, '"no end,Heart'),
    "a quote after a quoted cell": line(30, '"a" b,Heart'),
    "an over-long first row": line(2, '"a",Heart,more'),
    "an over-long last row": with_rows("a,Heart,more,cells"),
    "a short row": line(20, "only text"),
    "an unquoted comma": line(20, "pain, then rest,Heart"),
    "half of the rows short": table() + "".join(f"text {n}\n" for n in range(30)),
    "a longer header": table(head="text,label,age"),
    "a shorter header": table(head="text"),
    "a column twice": table(head="label,label"),
    "an empty file": "",
    "a header alone": f"{HEAD}\n",
    "only blank lines": "\n\n\n",
    "no header": table(head="pain,Heart"),
    "a label NaN": with_rows("a,NaN"),
    "a label nan in half of the rows": table([(t, "nan" if n % 2 else la) for n, (t, la) in enumerate(ROWS)]),
    "a label N/A": with_rows("a,N/A"),
    "a label null": with_rows("a,null"),
    "a label ?": with_rows("a,?"),
    "a spreadsheet's error as label": with_rows("a,#N/A"),
    "an empty label": with_rows("a,"),
    "an empty text": with_rows(",Heart"),
    "a label of spaces": with_rows("a,   "),
    "labels in other case": with_rows("a,heart", "b,HEART"),
    "labels with another hyphen": with_rows("a,heart-failure", "b,heart failure"),
    "labels with a no-break space": with_rows("a,heart failure", "b,heart\u00a0failure"),
    "labels in full-width letters": with_rows("a,\uff28eart"),
    "semicolons": table(head="text;label", delimiter=";"),
    "vertical bars": table(head="text|label", delimiter="|"),
    "tabs in a .csv": table(head="text\tlabel", delimiter="\t"),
    "Latin-1": with_rows("na\u00efve caf\u00e9,Heart").encode("latin-1"),
    "Windows-1252": with_rows("caf\u00e9 \u2013 bar,Heart").encode("cp1252"),
    "a letter lost before": with_rows("na\ufffdve,Heart"),
    "UTF-16 without its mark": table().encode("utf-16-le"),
    "zero bytes": table().encode() + b"a\x00b,Heart\n",
    "UTF-16 cut in half a letter": table().encode("utf-16")[:-1],
    "one class alone": table([(text, "Heart") for text, _ in ROWS]),
    "a split with another name": table([(t, f"{la},train") for t, la in ROWS], f"{HEAD},split")
    + "a,Heart,trian\n",
    "two labels in one cell of a row": line(30, '"a","Heart\nLung"'),
}


def read(folder, content, name="notes.csv"):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return prepare(DatasetSpec(kind="text", path=str(folder), test_fraction=0.0))


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_refused_or_counted(tmp_path, damage):
    try:
        found = read(tmp_path, DAMAGED[damage])
    except UserError as error:
        assert str(error).endswith(".")
    else:
        assert found.account["warnings"], f"{damage}: read in silence as {found.classes}"


def test_there_are_forty_of_them():
    assert len(DAMAGED) >= 40


@pytest.mark.parametrize("damage", ["a truncated gzip", "not a gzip"])
def test_damaged_gzip(tmp_path, damage):
    data = gzip.compress(table().encode())
    (tmp_path / "notes.csv.gz").write_bytes(data[: len(data) // 2] if "trunc" in damage else b"text,label\n")
    with pytest.raises(UserError, match="cannot be read"):
        prepare(DatasetSpec(kind="text", path=str(tmp_path)))


@pytest.mark.parametrize(
    "content",
    [
        '{"text": "a", "label": "x"\n',
        '["a", "x"]\n',
        '{"text": "a", "label": "x", "label": "y"}\n',
        '{"text": "a", "label": {"x": 1}}\n',
    ],
)
def test_damaged_json_lines(tmp_path, content):
    good = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in ROWS)
    (tmp_path / "notes.jsonl").write_text(good + content)
    with pytest.raises(UserError):
        prepare(DatasetSpec(kind="text", path=str(tmp_path)))


def test_sound_tables_are_read_without_a_word(tmp_path):
    for name, content in {
        "plain": table(),
        "cells over lines": with_rows('"first line\nsecond, with a comma\nthird",Heart'),
        "quotes in cells": with_rows('"he said ""no""",Heart', 'a 5" scar,Heart'),
        "blank lines": table().replace("\n", "\n\n"),
        "Windows line ends": table().replace("\n", "\r\n"),
        "a byte order mark": "\ufeff" + table(),
        "a class called none": with_rows("a,none"),
        "semicolons in texts": with_rows('"a; b; c",Heart'),
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        found = read(folder, content)
        assert found.account["warnings"] == [], name
        assert {"Heart", "Lung"} <= set(found.classes), name


def test_counts_and_line_numbers_are_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        found = read(tmp_path, with_rows("a,NaN", "b,heart", ",Heart"))
    assert "dropped 1 of 63 rows whose label is a word for a missing value ('NaN'; line 62" in caplog.text
    assert "'Heart' (30), 'heart' (1); the rarer ones are in line 63 of notes.csv" in caplog.text
    assert "dropped 1 of 62 rows without content or label (line 64 of notes.csv)" in caplog.text
    assert found.account["splits"]["train"] == {
        "read": 63,
        "dropped": {"a word for a missing value as label": 1, "no content or no label": 1},
    }
    assert found.account["files"][0]["rows"] == 63


def test_word_for_a_missing_value_may_be_a_class(tmp_path):
    (tmp_path / "notes.csv").write_text(with_rows("a,NA"))
    classes = ("Heart", "Lung", "NA")
    found = prepare(DatasetSpec(kind="text", path=str(tmp_path), keep_classes=classes, test_fraction=0.0))
    assert found.classes == classes and len(found.train.content) == 61


def test_swallowed_rows_name_the_line(tmp_path):
    with pytest.raises(UserError, match=r"line 10 of .* look like rows: close its quote"):
        read(tmp_path, DAMAGED["quotes that swallow rows"])


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_is_never_silent(tmp_path, seed):
    """Insert, delete or double delimiters, quotes and line ends anywhere: the other rows stay as they are."""
    rng = random.Random(seed)
    text = table()
    place = rng.randrange(len(HEAD) + 1, len(text))
    piece = rng.choice([",", '"', "\n", ';"', '"\n', '",', ""])
    damaged = text[:place] + piece + text[place + rng.randrange(2) :]
    whole = read(tmp_path, text)
    sound = dict(zip(whole.train.content, whole.train.labels, strict=True))
    try:
        found = read(tmp_path, damaged)
    except UserError:
        return
    read_now = dict(zip(found.train.content, found.train.labels, strict=True))
    changed = [one for one in sound if read_now.get(one) != sound[one]]
    # One letter may change the text or the label of its own row (which a reader cannot know), no other's.
    assert len(changed) <= 1 or found.account["warnings"], (piece, changed[:3])


PATIENTS = [f"{40 + n % 40},{'mf'[n % 2]},{100 + n},{'yes' if n % 3 else 'no'}" for n in range(60)]
PATIENTS_HEAD = "age,sex,pressure,ill"


def patients(row=None, rows=PATIENTS, head=PATIENTS_HEAD):
    """A table of patients, with the row in line 5 replaced."""
    rows = [*rows[:3], row, *rows[4:]] if row else rows
    return "\n".join([head, *rows]) + "\n"


def decimal_commas(delimiter):
    rows = [row.split(",") for row in PATIENTS]
    cells = [delimiter.join([age, sex, f"{pressure},5", ill]) for age, sex, pressure, ill in rows]
    return patients(rows=cells, head=PATIENTS_HEAD.replace(",", delimiter))


DAMAGED_TABLES = {
    "decimal commas": decimal_commas(";"),
    "thousands with commas": patients('40,m,"1,050",yes'),
    "a number with its unit": patients("40,m,105 mmHg,yes"),
    "a level in another case": patients("40,M,105,yes"),
    "a label in another case": patients("40,m,105,Yes"),
    "a label that is missing": patients("40,m,105,NaN"),
    "a label as two numbers": patients(
        rows=[f"{row.rsplit(',', 1)[0]},{n % 3}{'.0' * (n % 2)}" for n, row in enumerate(PATIENTS)]
    ),
    "a short row": patients("40,m,105"),
    "a long row": patients("40,m,105,yes,9"),
    "the header once more": patients(PATIENTS_HEAD),
    "a row of totals": patients(rows=[*PATIENTS, "Total,,6000,"]),
    "a row cut off": patients()[:-6],
    "an infinite number": patients("40,m,inf,yes"),
    "a number without an end": patients("40,m,1e400,yes"),
    "an index that pandas wrote": patients(
        rows=[f"{n},{row}" for n, row in enumerate(PATIENTS)], head=f",{PATIENTS_HEAD}"
    ),
    "a number for each patient": patients(
        rows=[f"{n},{row}" for n, row in enumerate(PATIENTS)], head=f"patient_id,{PATIENTS_HEAD}"
    ),
}


@pytest.mark.parametrize("damage", DAMAGED_TABLES)
def test_damaged_tables_of_columns(tmp_path, damage):
    (tmp_path / "patients.csv").write_text(DAMAGED_TABLES[damage])
    try:
        found = load(DatasetSpec(kind="table", path=str(tmp_path), label_column="ill"))
    except UserError as error:
        assert str(error).endswith(".")
    else:
        assert any("patients.csv" in one or "Column" in one for one in found.account["warnings"]), damage


TAGGED = "".join(f"{'pain' * (n + 1)}\tB-problem\nnow\tO\n\n" for n in range(20))
DAMAGED_TAGS = {
    "a space within a word": (TAGGED.replace("now\tO", "right now\tO", 1), "Line 2 .* has 3 columns"),
    "a column lost": (TAGGED.replace("\t", "\tNN\t").replace("now\tNN\t", "now\t", 1), "Line 2 .* has 2 col"),
    "a zero byte": (TAGGED.replace("now", "n\0w", 1), "line 2 holds a zero byte"),
    "a tag of another scheme": (TAGGED.replace("B-problem", "S-problem"), "no word with a BIO tag"),
}


@pytest.mark.parametrize("damage", DAMAGED_TAGS)
def test_damaged_tagged_text(tmp_path, damage):
    content, sentence = DAMAGED_TAGS[damage]
    (tmp_path / "notes.conll").write_text(content)
    with pytest.raises(UserError, match=sentence):
        prepare(DatasetSpec(kind="conll", path=str(tmp_path)))


def test_decimal_commas_are_no_categories(tmp_path):
    (tmp_path / "patients.csv").write_text(decimal_commas(";"))
    with pytest.raises(UserError, match=r"'pressure' holds numbers with a comma, such as '.*,5' in line"):
        load(DatasetSpec(kind="table", path=str(tmp_path), label_column="ill"))


def test_sentences_without_blank_lines_are_counted(tmp_path):
    (tmp_path / "notes.conll").write_text(f"{TAGGED}{TAGGED * 20}".replace("\n\n", "\n", 400) + TAGGED)
    (warning,) = prepare(DatasetSpec(kind="conll", path=str(tmp_path))).account["warnings"]
    assert "1 sentence of more than 500 words" in warning


def test_sentences_before_the_first_document_mark_are_counted(tmp_path):
    (tmp_path / "notes.conll").write_text(f"{TAGGED}-DOCSTART- a O\n\n{TAGGED}-DOCSTART- b O\n\n{TAGGED}")
    found = prepare(DatasetSpec(kind="conll", path=str(tmp_path)))
    (warning,) = found.account["warnings"]
    assert "20 sentences of notes.conll stand before its first -DOCSTART-" in warning


def test_texts_without_annotations_are_counted(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("She has chest pain today.\n")
        if number != 3:
            (tmp_path / f"{number}.ann").write_text("T1\tproblem 8 18\tchest pain\n")
    (warning,) = prepare(DatasetSpec(kind="brat", path=str(tmp_path))).account["warnings"]
    assert "1 text not read, without an .ann file beside: 3.txt" in warning


def test_entities_that_no_tag_can_hold_are_counted(tmp_path):
    spans = "T1\tproblem 8 18\tchest pain\nT2\tproblem 8 13;19 24\tchest today\n"
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("She has chest pain today.\n")
        (tmp_path / f"{number}.ann").write_text(spans)
    (warning,) = prepare(DatasetSpec(kind="brat", path=str(tmp_path))).account["warnings"]
    assert warning.startswith("30 entities in pieces")


def test_texts_without_concepts_are_counted(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("She has chest pain today\n")
        if number != 3:
            (tmp_path / f"{number}.con").write_text('c="chest pain" 1:2 1:3||t="problem"\n')
    (warning,) = prepare(DatasetSpec(kind="i2b2", path=str(tmp_path))).account["warnings"]
    assert "1 text not read, without a .con file: 3.txt" in warning


def test_tagged_files_are_in_the_account(tmp_path):
    (tmp_path / "notes.conll").write_text(f"-DOCSTART- a O\n\n{TAGGED}-DOCSTART- b O\n\n{TAGGED}")
    (file,) = prepare(DatasetSpec(kind="conll", path=str(tmp_path))).account["files"]
    assert file == {"file": "notes.conll", "rows": 40, "encoding": "utf-8", "documents": 2}


def test_files_beside_the_pictures_of_classes_are_counted(tmp_path):
    for number in range(8):
        folder = tmp_path / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        Image.new("L", (8, 8), number).save(folder / f"{number}.png")
    Image.new("L", (8, 8)).save(tmp_path / "stray.png")
    (tmp_path / "a" / "scan.dcm").write_bytes(b"x")
    (tmp_path / "README.md").write_text("where these are from")
    found = load(DatasetSpec(kind="images", path=str(tmp_path)))
    (warning,) = found.account["warnings"]
    assert "2 files are not read: a/scan.dcm, stray.png" in warning
