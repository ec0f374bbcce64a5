"""The advice on federations in which something was planted, and on one in which nothing was."""

import json

import numpy as np
import pytest

from fedfrozen_app.census.advice import near
from fedfrozen_app.census.merge import alpha
from fedfrozen_app.data.sources.raw_rows import Rows
from tests.census import planted
from tests.census.planted import census


def topics(found: dict) -> list[tuple[str, str]]:
    return [(note["topic"], note["site"]) for note in found["advice"]]


def test_alike_sites_get_no_advice():
    found = census(planted.healthy())
    assert topics(found) == [("all", "")]
    assert max(found["distances"]["labels"].values()) < 0.1
    assert found["alpha"] > 50  # as even as can be


def test_a_class_that_one_site_lacks():
    found = census(planted.missing_class())
    assert topics(found) == [("missing class", "west")]
    text = found["advice"][0]["text"]
    assert text.startswith("west has no class pneumonia: a personal head") and "class weights" in text
    # Those without pneumonia have a third of each: 25 % would have to change.
    apart = {pair: value for pair, value in found["distances"]["labels"].items() if "west" in pair}
    assert all(0.17 < value < 0.33 for value in apart.values())


def test_two_spellings_of_a_class_are_pointed_at_and_not_called_missing():
    found = census(planted.swapped_spelling())
    assert {topic for topic, _ in topics(found) if topic != "label skew"} == {"spelling"}
    texts = " ".join(note["text"] for note in found["advice"])
    assert "south writes the class 'Pneumonia', east, north and west 'pneumonia': if" in texts
    assert "east writes the class 'fractrue', north, south and west 'fracture': if" in texts
    assert "agree on one spelling" in texts


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("Pneumonia", "pneumonia", True),
        ("heart failure", "Heart-Failure", True),
        ("heart_failure", "heart failure", True),
        ("haemorrhage", "hemorrhage", True),
        ("stage 1", "stage 2", False),
        ("3", "8", False),
        ("cat", "car", False),
        ("pneumonia", "pneumothorax", False),
    ],
)
def test_which_names_may_be_one(one, other, expected):
    assert near(one, other) is expected


def test_a_tiny_site():
    found = census(planted.tiny_site(), floor=5)
    assert ("tiny site", "east") in topics(found)
    assert all(site == "east" for topic, site in topics(found) if topic != "label skew")
    assert "20 rows, the median site 240" in found["advice"][0]["text"]


def test_a_site_of_fewer_people_than_the_floor_says_only_that():
    by_site = planted.healthy()
    by_site["east"] = planted.pictures(np.random.default_rng(0), rows=9)
    found = census(by_site)
    assert found["sites"]["east"] == {
        "format": 1, "task": "image", "unit": "example", "floor": 10, "epsilon": None,
        "people": None, "rows": None, "tables": {}, "moments": {},
    }  # fmt: skip
    assert topics(found) == [("tiny", "east")]


def test_shifted_intensities():
    found = census(planted.shifted())
    assert topics(found) == [("shift", "south")]
    text = found["advice"][0]["text"]
    mean = np.mean([picture.mean() for picture in planted.shifted()["south"].content])
    assert "intensities" in text and f"darker: {mean:.0f} of 255 on average, elsewhere 110" in text
    assert "one window" in text


def test_languages_encodings_copies_and_missing_texts():
    rng = np.random.default_rng(0)
    german = "der Patient wurde mit Fieber und Schmerzen nicht gesehen"
    by_site = {
        "north": planted.texts(rng),
        "south": planted.texts(rng, words=german),
        "west": planted.texts(rng),
        "east": planted.texts(rng),
    }
    by_site["west"].content[:40] = ["the patient from MÃ¼nchen has a fever and the cough"] * 40
    by_site["east"].content[:60] = [None] * 60
    found = census(by_site, "text")
    kinds = {(topic, site) for topic, site in topics(found) if topic != "shift"}
    assert kinds == {
        ("language", "south"), ("encoding", "west"), ("duplicates", "west"), ("missing values", "east"),
    }  # fmt: skip
    assert "south writes de, most others en" in " ".join(note["text"] for note in found["advice"])


def test_rows_that_two_sites_share_are_counted_by_keyed_hashes():
    from fedfrozen_app.census.ask import Ask
    from fedfrozen_app.census.merge import merge
    from fedfrozen_app.census.records import records_of
    from fedfrozen_app.census.site import Rules, problem, released_counts

    by_site = planted.healthy()
    by_site["south"].content[:25] = by_site["north"].content[:25]
    by_site["west"].content[:3] = by_site["north"].content[30:33]
    ask = Ask("test", matches=True)
    rules = Rules(10, key=b"a word that only the sites know")
    answers = {
        site: released_counts(ask, records_of(rows, "image", None), rules, {})
        for site, rows in by_site.items()
    }
    found = merge(answers, {})
    assert found["matches"]["north | south"] == 25
    assert found["matches"]["north | west"] == "fewer than 10"
    assert found["matches"]["east | south"] == 0
    assert "hashes" not in str(found["sites"])
    # The key decides: whoever has another one cannot look a row up.
    other = released_counts(ask, records_of(by_site["north"], "image", None), Rules(10, key=b"another"), {})
    assert not set(other["hashes"]) & set(answers["north"]["hashes"])
    # Where one site keeps its hashes, nothing is said of any pair.
    del answers["east"]["hashes"]
    assert merge(answers, {})["matches"] is None
    assert problem(ask, Rules(10)) is not None


def test_a_census_is_the_same_whoever_answers_first():
    by_site = planted.missing_class()
    one, other = planted.census(by_site), planted.census(dict(reversed(by_site.items())))
    assert json.dumps(one) == json.dumps(other)
    assert list(one["sites"]) == sorted(by_site)
    clients = planted.census(
        {str(number): rows for number, rows in zip((10, 9, 2, 0), by_site.values(), strict=True)}
    )
    assert list(clients["sites"]) == ["0", "2", "9", "10"]


@pytest.mark.parametrize("true", [0.1, 0.5, 2.0])
def test_alpha_is_found_again(true):
    rng = np.random.default_rng(int(10 * true))
    shares = rng.dirichlet(np.full(8, true), size=60)  # by class, over the sites
    counts = np.array([rng.multinomial(500, share) for share in shares])
    table = {str(site): {str(name): float(counts[name, site]) for name in range(60)} for site in range(8)}
    assert alpha(table) == pytest.approx(true, rel=0.2)


def test_a_label_in_the_data_is_named_only_with_enough_people_behind_it():
    rows = planted.pictures(np.random.default_rng(0))
    rows.labels[:3] = ["John Smith, born 1.2.1950"] * 3
    rows = Rows(rows.content, rows.labels, rows.columns, rows.origins)
    told = planted.told(rows)
    assert "John" not in str(told) and told["tables"]["classes"]["others_hidden"]
