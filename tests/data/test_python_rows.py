"""Rows given as Python objects: every form gives the same rows, and every other one sentence."""

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils import data as torch_data

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.account import accounting
from fedfrozen_app.data.sources.python_rows import given_rows
from fedfrozen_app.data.sources.raw_rows import DatasetSpec

TEXTS, LABELS = ["good day", "bad night", "fair noon"] * 4, ["a", "b", "a"] * 4
PIXELS = np.random.default_rng(0).integers(0, 255, (12, 5, 4), dtype=np.uint8)


def read(thing, **settings):
    return given_rows(thing)(DatasetSpec(**settings))


class Listed(torch_data.Dataset):
    def __init__(self, items, classes=None):
        self.items = items
        if classes is not None:
            self.classes = classes

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        return self.items[row]


TEXT_FORMS = {
    "pandas": pd.DataFrame({"text": TEXTS, "label": LABELS}),
    "pandas categories": pd.DataFrame({"text": TEXTS, "label": pd.Categorical(LABELS)}),
    "datasets": datasets.Dataset.from_dict({"text": TEXTS, "label": LABELS}),
    "lists": {"text": TEXTS, "label": LABELS},
    "series": {"text": pd.Series(TEXTS, index=range(50, 62)), "label": pd.Series(LABELS)},
    "numpy": (np.array(TEXTS), np.array(LABELS)),
    "numpy objects": (np.array(TEXTS, dtype=object), LABELS),
    "torch pairs": Listed(list(zip(TEXTS, LABELS, strict=True))),
    "torch dictionaries": Listed([{"text": t, "label": y} for t, y in zip(TEXTS, LABELS, strict=True)]),
    "torch subset": torch_data.Subset(Listed([*zip(TEXTS, LABELS, strict=True), ("x", "y")]), range(12)),
}


@pytest.mark.parametrize("form", TEXT_FORMS)
def test_texts_in_every_form_are_the_same_rows(form):
    found = read(TEXT_FORMS[form])
    assert (found.task, found.test) == ("text", None)
    assert found.train.content == TEXTS and found.train.labels == LABELS
    assert found.train.origins[3] == "row 3 of train"


def test_the_content_is_the_rows_whatever_their_form():
    plain = {name: given_rows(thing).digest for name, thing in TEXT_FORMS.items() if "categories" not in name}
    assert len(set(plain.values())) == 1
    assert given_rows({"text": TEXTS[::-1], "label": LABELS}).digest != plain["lists"]
    assert given_rows({"text": TEXTS, "target": LABELS}).digest != plain["lists"]
    pictures = {given_rows(one).digest for one in ((PIXELS, LABELS), (torch.tensor(PIXELS), LABELS))}
    assert len(pictures) == 1
    changed = PIXELS.copy()
    changed[3, 2, 1] ^= 1
    assert given_rows((changed, LABELS)).digest not in pictures


PICTURE_FORMS = {
    "uint8": (PIXELS, LABELS),
    "a channel last": (PIXELS[..., None], LABELS),
    "a channel first": (torch.from_numpy(PIXELS)[:, None], LABELS),
    "whole numbers": (PIXELS.astype(np.int64), LABELS),
    "shares": (PIXELS / 255, LABELS),
    "a TensorDataset": Listed(
        [(torch.from_numpy(one)[None] / 255, y) for one, y in zip(PIXELS, LABELS, strict=True)]
    ),
    "PIL": Listed([(Image.fromarray(one), y) for one, y in zip(PIXELS, LABELS, strict=True)]),
    "a list of PIL": {"image": [Image.fromarray(one) for one in PIXELS], "label": LABELS},
    "a DataFrame of arrays": pd.DataFrame({"image": list(PIXELS), "label": LABELS}),
}


@pytest.mark.parametrize("form", PICTURE_FORMS)
def test_pictures_in_every_form_are_the_same_pixels(form):
    rows = given_rows(PICTURE_FORMS[form])
    found = rows(DatasetSpec())
    assert rows.has_pictures and found.task == "image" and found.train.labels == LABELS
    assert all(np.array_equal(one, other) for one, other in zip(found.train.content, PIXELS, strict=True))


def test_three_channels_first_or_last_and_black_and_white():
    colour = np.random.default_rng(1).integers(0, 255, (6, 5, 4, 3), dtype=np.uint8)
    for given in (colour, torch.from_numpy(colour).permute(0, 3, 1, 2)):
        content = read((given, LABELS[:6])).train.content
        assert all(np.array_equal(one, other) for one, other in zip(content, colour, strict=True))
    small = torch.zeros(6, 3, 3, 3, dtype=torch.uint8)
    small[:, 0] = 9  # both ends may be the channels: torch has them first
    assert read((small, LABELS[:6])).train.content[0][0, 0].tolist() == [9, 0, 0]
    assert read((small.numpy(), LABELS[:6])).train.content[0][0].tolist() == [[9, 9, 9]] * 3
    mask = PIXELS > 100
    assert np.array_equal(read((mask, LABELS)).train.content[0], mask[0] * 255)


def test_splits_and_a_split_column():
    frame = pd.DataFrame({"text": TEXTS, "label": LABELS})
    whole = given_rows({"train": frame, "test": datasets.Dataset.from_pandas(frame[:5])})
    found = whole(DatasetSpec())
    assert len(found.train.content) == 12 and found.test.content == TEXTS[:5]
    assert whole.what == "a pandas DataFrame of 12 rows as train and a datasets.Dataset of 5 rows as test"
    found = read({"train": (TEXTS, LABELS), "test": (TEXTS[:3], LABELS[:3])})
    assert found.train.content == TEXTS and found.test.labels == LABELS[:3]
    parted = given_rows(frame.assign(split=["train"] * 9 + ["test"] * 3))
    for _ in range(2):  # reading takes nothing away
        assert len(parted(DatasetSpec()).test.content) == 3
    with pytest.raises(UserError, match="has no split 'train': set"):
        read({"fit": frame, "test": frame})
    assert len(read({"fit": frame, "test": frame}, train_split="fit").train.content) == 12


def test_labels_keep_their_names_and_their_order():
    frame = pd.DataFrame({"text": TEXTS, "label": pd.Categorical(LABELS, ["b", "a", "never"])})
    assert read(frame).class_names == ("b", "a", "never")
    numbered = Listed(
        [(text, "ab".index(label)) for text, label in zip(TEXTS, LABELS, strict=True)], ["a", "b"]
    )
    assert read(numbered).train.labels == LABELS and read(numbered).class_names == ("a", "b")
    part = torch_data.Subset(numbered, [0, 1, 2])
    assert read(part).class_names == ("a", "b")
    tensors = torch_data.TensorDataset(torch.from_numpy(PIXELS)[:, None], torch.tensor([0, 1, 2] * 4))
    assert read(tensors).train.labels == ["0", "1", "2"] * 4
    several = {"text": TEXTS, "label": [["a", "b"], ["b"], ["a"]] * 4}
    assert read(several, task="multilabel").train.labels[0] == ["a", "b"]


def test_missing_values_and_other_columns_are_those_of_a_file():
    frame = pd.DataFrame(
        {"text": [*TEXTS[:11], None], "label": ["a", np.nan, *LABELS[2:]], "ward": [1, 2, 3] * 4}
    )
    found = read(frame)
    assert found.train.content[11] is None and found.train.labels[1] is None
    assert found.train.columns == {"ward": [1, 2, 3] * 4}
    note = {"note": TEXTS, "kind": LABELS}
    assert read(note, text_column="note", label_column="kind").train.labels == LABELS
    with accounting() as account:
        read(frame)
    (told,) = account.as_json()["files"]
    assert told == {
        "file": "given from Python",
        "what": "a pandas DataFrame of 12 rows",
        "rows": 12,
        "columns": ["text", "label", "ward"],
    }


class Stream(torch_data.IterableDataset):
    def __iter__(self):
        return iter([])


class Endless(torch_data.Dataset):
    def __getitem__(self, row):
        return "text", 0


REFUSED = [
    (PIXELS, "one ndarray has no labels: give .inputs, labels."),
    (pd.Series(TEXTS), "one Series has no labels"),
    (Stream(), "a streamed data set has no rows by number"),
    (datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(), "a streamed data set"),
    (torch_data.DataLoader(Listed([("a", 0)])), "already in batches: give its data set, loader.dataset"),
    ([{"text": "a", "label": "b"}], "a list of dictionaries is no table: give pandas.DataFrame"),
    (object(), "object holds no rows that can be read: give a pandas DataFrame"),
    (["a", "b"], "list holds no rows that can be read"),
    ((PIXELS, LABELS[:3]), r"different numbers of rows \(image 12, label 3\)"),
    ((np.zeros((0, 4, 4)), []), "has no rows in 'train'"),
    ((np.zeros((12, 7)), LABELS), "has 7 numbers in each row: fedfrozen reads texts, and pictures of shape"),
    ((TEXTS, np.eye(2)[[0, 1] * 6]), r"'label' has 2 numbers in each row.*\(argmax\)"),
    ((PIXELS / 255 - 0.5, LABELS), "has pixels from -0.5 to .* leave normalisation out"),
    ((PIXELS / 16, LABELS), "has pixels from 0 to 15.*: divide them by 15"),
    ((PIXELS.astype(np.int32) * 200, LABELS), "divide them by|uint8"),
    ((np.full((12, 4, 4), np.nan), LABELS), "leave normalisation out"),
    ((np.zeros((12, 4, 4, 4), np.uint8), LABELS), r"pictures of shape \(4, 4, 4\): give \(height, width\)"),
    ((np.zeros((12, 4, 4), complex), LABELS), "pictures of complex128: give numbers"),
    (pd.DataFrame([["a", "b", "c"]] * 3, columns=["text", "label", "text"]), "the column 'text' twice"),
    (Listed([("a", 0, 1)]), "A row of the torch Dataset Listed is tuple: give .input, label."),
    (Endless(), r"has no len\(\)"),
    ({"train": Stream()}, "a streamed data set"),
    ({"train": PIXELS, "test": PIXELS}, "one ndarray has no labels"),
    ({"image": [PIXELS[0], "x"], "label": ["a", "b"]}, "holds pictures and a str: give pictures alone"),
]


@pytest.mark.parametrize(("thing", "sentence"), REFUSED, ids=[pattern[:30] for _, pattern in REFUSED])
def test_what_cannot_be_read_gets_one_sentence(thing, sentence):
    with pytest.raises(UserError, match=sentence) as refused:
        read(thing)
    assert "\n" not in str(refused.value)


def test_a_frame_without_texts_says_which_columns_there_are():
    with pytest.raises(
        UserError, match=r"to the column to use: the data have age, label. A table .*dataset=table"
    ):
        read(pd.DataFrame({"age": [1, 2], "label": ["a", "b"]}))
