"""Every figure of a census against pandas and numpy on the same rows.

`FEDFROZEN_DATA=DIR pytest -m slow tests/census/test_figures.py` takes PACS and MTSamples from DIR too.
"""

import io
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pandas
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.census.ask import Ask
from fedfrozen_app.census.measure import LENGTHS, LEVELS, SIZES
from fedfrozen_app.census.merge import merge
from fedfrozen_app.census.record_source import counting, records_of_folder
from fedfrozen_app.census.site import Rules, released_counts
from fedfrozen_app.config import DatasetConfig
from fedfrozen_app.data.sources.synthetic import word_tokenizer

DATA = Path(os.environ.get("FEDFROZEN_DATA", "/nowhere"))
AGES = (0.0, 18.0, 40.0, 65.0, 80.0, 120.0)
COLUMNS = {"age": AGES, "sex": ("F", "M")}
NOTHING = ("", " ", None)


def notes(rows: int = 400, seed: int = 0) -> pandas.DataFrame:
    """Made-up notes of patients, with everything that real ones lack."""
    rng = np.random.default_rng(seed)
    words = "the and of with patient fever cough heart Müller reports no pain since".split()  # noqa: SIM905
    texts = [" ".join(rng.choice(words, rng.integers(3, 60))) for _ in range(rows)]
    for row in rng.choice(rows, 12, replace=False):
        texts[row] = ""
    for row in rng.choice(rows, 30, replace=False):
        texts[row] = "the same note of every day, and the next"
    return pandas.DataFrame(
        {
            "text": texts,
            "label": rng.choice(["pneumonia", "fracture", "stroke", ""], rows, p=[0.5, 0.3, 0.15, 0.05]),
            "patient": rng.choice([f"p{number}" for number in range(rows // 3)], rows),
            "age": rng.choice(["", "unknown", *map(str, range(0, 101, 7))], rows),
            "sex": rng.choice(["F", "M", "", "X"], rows, p=[0.45, 0.45, 0.05, 0.05]),
        }
    )


def site(frame: pandas.DataFrame, folder: Path, floor: int = 1, **more) -> dict:
    path = folder / f"{len(list(folder.iterdir()))}.csv"
    frame.to_csv(path, index=False)
    dataset = DatasetConfig(name="notes", kind="text", path=str(path), unit_column="patient")
    rules = Rules(floor, COLUMNS)
    return released_counts(Ask("test", columns=COLUMNS), records_of_folder(dataset), rules, {}, **more)


def same_words(told: dict, values: pandas.Series, people: pandas.Series) -> None:
    """A table of words: rows and people of every cell."""
    rows = {name: count for name, count in told["rows"].items() if count}
    assert rows == values.value_counts().to_dict()
    held = people.groupby(values).nunique().to_dict()
    assert {name: count for name, count in told["people"].items() if count} == held
    assert told["total"] == len(values)


def same_numbers(told: dict, values: np.ndarray, people: np.ndarray, edges) -> None:
    """A histogram: rows and people of every interval, and those without a value."""
    held = ~np.isnan(values)
    clipped = np.clip(values[held], edges[0], edges[-1])
    assert told["edges"] == list(edges)
    assert told["rows"] == np.histogram(clipped, edges)[0].tolist()
    cells = pandas.cut(clipped, edges, right=False, labels=False, include_lowest=True)
    cells = np.where(np.isnan(cells), len(edges) - 2, cells)
    counted = pandas.Series(people[held]).groupby(cells).nunique()
    assert told["people"] == [int(counted.get(cell, 0)) for cell in range(len(edges) - 1)]
    assert told["none"] == {"rows": int((~held).sum()), "people": len(set(people[~held]))}


def same_moments(told: dict, values: np.ndarray) -> None:
    values = values[~np.isnan(values)]
    assert told["rows"] == len(values)
    assert told["mean"] == pytest.approx(values.mean(), rel=1e-12)
    assert told["variance"] == pytest.approx(values.var(), rel=1e-9)


def check_notes(told: dict, frame: pandas.DataFrame) -> None:
    people = frame["patient"]
    text, label = frame["text"].str.strip(), frame["label"].str.strip()
    assert (told["people"], told["rows"]) == (people.nunique(), len(frame))
    same_words(told["tables"]["classes"], label.replace("", "(none)"), people)
    for name, values in (("content", text), ("label", label)):
        states = pandas.Series(np.where(values == "", "missing", "present"))
        same_words(told["tables"][f"missing/{name}"], states, people)
    ages = pandas.to_numeric(frame["age"], errors="coerce")
    states = pandas.Series(
        np.where(frame["age"] == "", "empty", np.where(ages.isna(), "unreadable", "present"))
    )
    same_words(told["tables"]["missing/age"], states, people)
    same_numbers(told["tables"]["numbers/age"], ages.to_numpy(), people.to_numpy(), AGES)
    same_moments(told["moments"]["numbers/age"], ages.to_numpy())
    sexes = frame["sex"].replace({"": "(none)", "X": "other"})
    same_words(told["tables"]["words/sex"], sexes, people)
    lengths = np.where(text == "", np.nan, frame["text"].str.len())
    same_numbers(told["tables"]["length"], lengths, people.to_numpy(), LENGTHS)
    same_moments(told["moments"]["length"], lengths)
    twice = text.duplicated(keep=False)
    same_words(
        told["tables"]["repeated"],
        pandas.Series(np.where(text == "", "(none)", np.where(twice, "repeated", "single"))),
        people,
    )


def test_a_site_counts_what_pandas_counts(tmp_path):
    frame = notes()
    told = site(frame, tmp_path)
    check_notes(told, frame)
    tokens = np.where(frame["text"] == "", np.nan, frame["text"].map(lambda text: len(text.encode()) + 1))
    same_numbers(told["tables"]["tokens"], tokens, frame["patient"].to_numpy(), LENGTHS)
    assert told["tables"]["language"]["rows"]["en"] > 300
    accents = (frame["text"].str.contains("ü")).sum()
    assert told["tables"]["script"]["rows"]["latin"] == accents
    assert told["moments"]["unknown"]["mean"] == 0


def test_unknown_tokens_are_those_of_the_model(tmp_path):
    tokenizer = word_tokenizer()
    frame = notes()
    told = site(frame, tmp_path, tokens=counting(tokenizer))
    texts = [text for text in frame["text"] if text]
    shares = [Counter(tokenizer(text)["input_ids"])[tokenizer.unk_token_id] for text in texts]
    sizes = [len(tokenizer(text)["input_ids"]) for text in texts]
    expected = np.mean([share / size for share, size in zip(shares, sizes, strict=True)])
    assert told["moments"]["unknown"]["mean"] == pytest.approx(expected, rel=1e-12) and expected > 0.1
    assert told["moments"]["tokens"]["mean"] == pytest.approx(np.mean(sizes), rel=1e-12)


def test_sites_together_are_the_pooled_rows(tmp_path):
    """Patients of different sites are different people: each has its own letter."""
    frames = [notes(rows, seed) for seed, rows in enumerate((300, 200, 90))]
    for number, frame in enumerate(frames):
        frame["patient"] = f"{number}-" + frame["patient"]
    answers = {f"s{number}": site(frame, tmp_path) for number, frame in enumerate(frames)}
    pooled = merge(answers, {})["pooled"]
    frame = pandas.concat(frames, ignore_index=True)
    repeated = pooled["tables"].pop("repeated")
    check_notes(pooled | {"tables": pooled["tables"] | {"repeated": repeated_of(frame)}}, frame)
    assert repeated["total"] == len(frame)
    ages = pandas.to_numeric(frame["age"], errors="coerce").dropna()
    for share, found in pooled["quantiles"]["numbers/age"].items():
        assert found["low"] <= np.quantile(ages, float(share), method="inverted_cdf") <= found["high"]


def repeated_of(frame: pandas.DataFrame) -> dict:
    """Copies are looked for within a site, so the pooled table is another one: taken from pandas here."""
    text, people = frame["text"].str.strip(), frame["patient"]
    states = pandas.Series(
        np.where(text == "", "(none)", np.where(text.duplicated(keep=False), "repeated", "single"))
    )
    counts = states.value_counts().to_dict()
    return {"rows": counts, "people": people.groupby(states).nunique().to_dict(), "total": len(frame)}


def test_digits_through_the_command(tmp_path):
    """Four clients, and pooled they are the rows that a run would train on."""
    words = ["census", f"output_dir={tmp_path}", "num_clients=4", "dataset.validation=0", "--floor", "1"]
    assert command(words) == 0
    found = json.loads((tmp_path / "census.json").read_text())
    images, labels = load_digits(return_X_y=True)
    pixels = (images.astype(int) * 255 // 16).reshape(len(labels), -1)
    used = trained_rows(labels)
    pooled = found["pooled"]
    assert pooled["rows"] == len(used) and len(found["sites"]) == 4
    classes = {name: count for name, count in pooled["tables"]["classes"]["rows"].items() if count}
    assert classes == {str(digit): int((labels[used] == digit).sum()) for digit in range(10)}
    same_moments(pooled["moments"]["brightness"], pixels[used].mean(axis=1))
    shares = np.histogram(pixels[used], LEVELS)[0] / pixels[used].size * len(used)
    np.testing.assert_allclose(pooled["tables"]["intensity"]["rows"], shares, atol=1e-6)
    assert pooled["tables"]["width"]["rows"][0] == len(used)  # 8 pixels: below 16
    assert pooled["tables"]["channels"]["rows"]["1"] == len(used)
    labels_apart = found["distances"]["labels"]
    counts = [found["sites"][str(n)]["tables"]["classes"]["rows"] for n in range(4)]
    shares = [np.array([own[str(d)] for d in range(10)]) / sum(own.values()) for own in counts]
    assert labels_apart["0 | 3"] == pytest.approx(0.5 * np.abs(shares[0] - shares[3]).sum())
    assert (tmp_path / "census.html").stat().st_size > 10_000


def trained_rows(labels: np.ndarray) -> np.ndarray:
    """Of the digits, those that are not held out for testing: as the data set's own split draws them."""
    rng = np.random.default_rng(0)
    tested = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(labels == digit))
        tested[members[: round(0.2 * len(members))]] = True
    return np.flatnonzero(~tested)


# Larger data ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "pacs").is_dir(), reason="set FEDFROZEN_DATA to a folder that holds pacs")
def test_pacs_by_domain_is_what_pillow_and_numpy_say():
    answers, everything = {}, []
    for path in sorted((DATA / "pacs").glob("*.parquet")):
        dataset = DatasetConfig(name="pacs", kind="parquet", path=str(path))
        told = released_counts(Ask("test"), records_of_folder(dataset), Rules(1), {})
        frame = pandas.read_parquet(path)
        pictures = [Image.open(io.BytesIO(cell["bytes"])) for cell in frame["image"]]
        check_pictures(told, pictures, frame["label"])
        answers[path.stem] = told
        everything.append((pictures, frame["label"]))
    pooled = merge(answers, {})["pooled"]
    pictures = [picture for some, _ in everything for picture in some]
    assert pooled["rows"] == len(pictures) == 9991
    check_pictures(pooled, pictures, pandas.concat([labels for _, labels in everything]), names=False)


def check_pictures(told: dict, pictures: list, labels: pandas.Series, names: bool = True) -> None:
    pixels = [np.asarray(picture.convert("RGB")) for picture in pictures]
    means = np.array([picture.mean() for picture in pixels])
    people = np.arange(len(pictures))
    same_moments(told["moments"]["brightness"], means)
    same_numbers(told["tables"]["width"], np.array([p.width for p in pictures], float), people, SIZES)
    same_numbers(told["tables"]["height"], np.array([p.height for p in pictures], float), people, SIZES)
    same_numbers(told["tables"]["brightness"], means, people, LEVELS)
    shares = sum(np.histogram(picture, LEVELS)[0] / picture.size for picture in pixels)
    np.testing.assert_allclose(told["tables"]["intensity"]["rows"], shares, rtol=1e-6, atol=1e-6)
    counts = sorted(count for count in told["tables"]["classes"]["rows"].values() if count)
    assert counts == sorted(labels.value_counts())


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "mtsamples").is_dir(), reason="set FEDFROZEN_DATA to a folder with mtsamples")
def test_mtsamples_by_specialty_is_what_pandas_says(tmp_path):
    frame = pandas.read_json(DATA / "mtsamples" / "mtsamples.jsonl.gz", lines=True)
    frame = frame[frame["clinical_specialty"].notna()]
    answers = {}
    for specialty, part in frame.groupby("clinical_specialty"):
        if len(part) < 20:
            continue
        path = tmp_path / f"{len(answers)}.jsonl"
        part[["text", "clinical_specialty"]].to_json(path, orient="records", lines=True)
        dataset = DatasetConfig(
            name="mt", kind="text", path=str(path), text_column="text", label_column="clinical_specialty"
        )
        told = released_counts(Ask("test"), records_of_folder(dataset), Rules(1), {})
        check_texts(told, part)
        answers[specialty] = told
    pooled = merge(answers, {})["pooled"]
    used = frame[frame["clinical_specialty"].isin(answers)]
    check_texts(pooled, used, within=False)
    rows = {name: count for name, count in pooled["tables"]["classes"]["rows"].items() if count}
    assert rows == used["clinical_specialty"].value_counts().to_dict() and len(answers) >= 10


def check_texts(told: dict, frame: pandas.DataFrame, within: bool = True) -> None:
    lengths = frame["text"].str.len().to_numpy(float)
    tokens = frame["text"].map(lambda text: len(text.encode()) + 1).to_numpy(float)
    people = np.arange(len(frame))
    assert told["rows"] == len(frame)
    for name, values in (("length", lengths), ("tokens", tokens)):
        same_numbers(told["tables"][name], values, people, LENGTHS)
        same_moments(told["moments"][name], values)
    if within:
        assert told["tables"]["repeated"]["rows"]["repeated"] == frame["text"].duplicated(keep=False).sum()
    ascii_only = frame["text"].map(str.isascii).sum()
    assert told["tables"]["script"]["rows"]["ascii"] == ascii_only
