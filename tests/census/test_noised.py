"""The noise of a census: its distribution, its size, and what one person more or less can change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedfrozen_app.census.cells import Table
from fedfrozen_app.census.measure import NONE, Measurements, measure
from fedfrozen_app.census.noised import counted_once, geometric, release_with_noise, spread, tables_for_noise
from fedfrozen_app.census.records import Records
from fedfrozen_app.privacy.keystream import Keystream

LEAST = 1e-6  # one of a million right streams fails


def fits(noise: np.ndarray, epsilon: float) -> None:
    """P(k) = (1 - q)/(1 + q) · q^|k| with q = exp(-epsilon), what is rare taken together on either side."""
    q = np.exp(-epsilon)
    far = int(np.floor(np.log(20 * (1 + q) / len(noise)) / -epsilon))  # 20 expected in each tail
    inner = np.arange(-far + 1, far)
    tail = q**far / (1 + q)
    expected = len(noise) * np.concatenate([[tail], (1 - q) / (1 + q) * q ** np.abs(inner), [tail]])
    held = np.bincount(np.clip(noise, -far, far) + far, minlength=2 * far + 1)
    assert expected.sum() == pytest.approx(len(noise))
    assert chisquare(held, expected).pvalue > LEAST


@pytest.mark.parametrize("epsilon", [0.1, 0.7, 2.0])
def test_the_noise_is_two_sided_geometric(epsilon):
    noise = geometric(200_000, epsilon, Keystream())
    fits(noise, epsilon)
    assert noise.std() == pytest.approx(spread(epsilon, 1), rel=0.03)


def test_every_told_cell_has_noise_of_its_share_of_epsilon():
    """Two tables, epsilon 1: each cell of either has noise of epsilon 1/2, and no two cells the same."""
    people = np.arange(900)
    words = Table("class", people, people % 3, np.ones(900), ("a", "b", NONE), public=3, by_person=True)
    ages = Table("age", people, people % 2, np.ones(900), edges=(0.0, 50.0, 100.0), by_person=True)
    stream, apart = Keystream(), []
    for _ in range(2000):
        told = release_with_noise(Measurements(900, 900, (words, ages), ()), 1.0, stream)["tables"]
        by_word = [told["class"]["people"][name] - 300 for name in words.names]
        apart.append([*by_word, *(count - 450 for count in told["age"]["people"])])
    noise = np.array(apart)
    for cell in noise.T:
        fits(cell, 0.5)
    assert np.abs(np.corrcoef(noise.T) - np.eye(noise.shape[1])).max() < 0.1


ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(ROWS, st.booleans())
def test_one_person_more_or_less_moves_one_cell_of_a_table_by_one(rows, numbered):
    """Whatever she has rows of: that is what the noise is made for."""
    person, cell, weight = (np.array(column) for column in zip(*dict(_lines(rows)).values(), strict=True))
    how = {"edges": tuple(map(float, range(5)))} if numbered else {"names": ("a", "b", NONE, "c", "d")}
    public = 0 if numbered else 3

    def counts(keep: np.ndarray) -> np.ndarray:
        table = Table("t", person[keep], cell[keep], weight[keep].astype(float), public=public, **how)
        return counted_once(table).people()

    whole = counts(np.ones(len(person), bool))
    assert whole.sum() == len(np.unique(person))
    for left_out in np.unique(person):
        assert np.abs(whole - counts(person != left_out)).sum() == 1


def _lines(rows):
    """Each person and cell once."""
    for person, cell, weight in rows:
        yield (person, cell), (person, cell, weight)


# Few values, so that people share what they have.
TEXTS = st.sampled_from([None, "", "a note", "another note", "\N{CYRILLIC CAPITAL LETTER BE}"])
PICTURES = st.sampled_from([None, *(np.full((2, 2), grey, np.uint8) for grey in (0, 9, 250))])
LABELS = st.sampled_from([(), ("flu",), ("flu", "stroke"), ("a name that is only here",)])
AGES, SEXES = st.sampled_from([None, 7, "30", "?"]), st.sampled_from([None, "F", "X"])
COLUMNS = {"age": (0.0, 18.0, 65.0), "sex": ("F", "M")}


@pytest.mark.parametrize(("task", "contents"), [("multilabel", TEXTS), ("image", PICTURES)])
def test_one_person_more_or_less_changes_no_table_by_more_than_its_noise_hides(task, contents):
    """From the rows themselves. A table of which rows are repeated broke it: her copies moved everybody."""
    one_row = st.tuples(st.integers(0, 4), contents, LABELS, AGES, SEXES)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(one_row, min_size=1, max_size=8))
    def check(rows):
        whole = noised_counts(task, rows)
        for left_out in {person for person, *_ in rows}:
            rest = noised_counts(task, [row for row in rows if row[0] != left_out])
            assert rest.keys() == whole.keys()
            for name, counts in whole.items():
                assert np.abs(counts - rest[name]).sum() <= 1, name

    check()


def noised_counts(task, rows):
    """What noise is added to, by table."""
    people, contents, labels, ages, sexes = zip(*rows, strict=True) if rows else ((),) * 5
    names, numbers = np.unique(np.array(people, dtype=np.int64), return_inverse=True)
    records = Records(
        *(task, contents, labels, {"age": ages, "sex": sexes}, numbers),
        *(tuple(map(str, names)), "patient", ("flu", "stroke")),
    )
    return {table.name: table.people() for table in tables_for_noise(measure(records, COLUMNS))}


def test_which_rows_are_repeated_is_in_no_answer_with_noise():
    records = Records("text", ["a note"] * 9, [("flu",)] * 9, {}, np.arange(9), tuple("abcdefghi"), "patient")
    measured = measure(records, {})
    assert {table.name for table in measured.tables if not table.by_person} == {"repeated"}
    assert "repeated" not in release_with_noise(measured, 1.0)["tables"]
