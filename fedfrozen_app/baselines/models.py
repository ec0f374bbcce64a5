"""The plain models by task. Another one is a function and a line in `BASELINES`."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedfrozen_app.baselines.same_rows import SameRows
from fedfrozen_app.data.sources.entities import iob2
from fedfrozen_app.tasks.entity_tags import OUTSIDE

SIDE = 32  # pixels: larger pictures are averaged down
Predict = Callable[
    [SameRows], Any
]  # trains on the train rows; returns predictions on the test rows, in the format of labels


@dataclass(frozen=True)
class Baseline:
    name: str
    predict: Predict
    quick: bool = True  # takes seconds, so every run can end with it
    alone: bool = False  # trained on each client's rows separately; metrics are averaged over clients


def linear_on_texts(rows: SameRows) -> np.ndarray:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    words = TfidfVectorizer(sublinear_tf=True)
    train, test = words.fit_transform(rows.train), words.transform(rows.test)
    # One per class or label, which is fastest for many sparse columns. Rows of length 1 need little
    # regularisation: with C=1 this model is 13 points worse on Ohsumed's 23 classes, an unfairly weak
    # baseline.
    model = OneVsRestClassifier(LogisticRegression(C=10, solver="liblinear", random_state=0))
    return _predicted(model, train, rows.train_labels, test)


def linear_on_pixels(rows: SameRows) -> np.ndarray:
    from sklearn.linear_model import LogisticRegression

    return _predicted(LogisticRegression(), _pixels(rows.train), rows.train_labels, _pixels(rows.test))


def _predicted(model: Any, train: Any, labels: np.ndarray, test: Any) -> np.ndarray:
    """Fit and predict on one thread: products this small do not benefit from more."""
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of iterations is limited
        warnings.filterwarnings("ignore", message="Label not")  # a label without train rows
        return np.asarray(model.fit(train, labels).predict(test))


def linear_on_table(rows: SameRows) -> np.ndarray:
    from sklearn.linear_model import LinearRegression, LogisticRegression

    model = LinearRegression() if rows.task == "regression" else LogisticRegression(max_iter=1000)
    return _predicted(model, rows.train, rows.train_labels, rows.test)


def trees(rows: SameRows) -> np.ndarray:
    """Histogram gradient boosting: a standard first model for a table."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    if len(np.unique(rows.train_labels)) < 2:  # a site with one class can only predict that
        return np.full(len(rows.test), rows.train_labels[0])
    kind = HistGradientBoostingRegressor if rows.task == "regression" else HistGradientBoostingClassifier
    return _predicted(kind(random_state=0), rows.train, rows.train_labels, rows.test)


def _pixels(pictures: np.ndarray) -> np.ndarray:
    """(rows, values between 0 and 1) of (rows, channels, height, width)."""
    step = max(1, pictures.shape[-1] // SIDE)
    if step > 1:
        count, channels, height, width = pictures.shape
        kept = pictures[:, :, : height // step * step, : width // step * step]
        kept = kept.reshape(count, channels, height // step, step, width // step, step)
        pictures = kept.mean(axis=(3, 5))
    return pictures.reshape(len(pictures), -1).astype(np.float32) / 255


def dictionary(rows: SameRows) -> list[list[str]]:
    """Each word gets its most frequent tag; an unknown word gets none."""
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for words, tags in zip(rows.train, rows.train_labels, strict=True):
        for word, tag in zip(words, tags, strict=True):
            seen[word.lower()][tag] += 1
    usual = {word: min(counts, key=lambda tag: (-counts[tag], tag)) for word, counts in seen.items()}
    return [iob2([usual.get(word.lower(), OUTSIDE) for word in words]) for words in rows.test]


def linear_on_words(rows: SameRows) -> list[list[str]]:
    """Logistic regression of a word's tag on the word, its shape and its neighbours."""
    from sklearn.feature_extraction import FeatureHasher
    from sklearn.linear_model import SGDClassifier

    hashed = FeatureHasher(2**18, input_type="string")
    flat = [tag for tags in rows.train_labels for tag in tags]
    model = SGDClassifier(loss="log_loss", alpha=1e-6, random_state=0)
    model.fit(hashed.transform(clue for words in rows.train for clue in clues(words)), flat)
    found = iter(model.predict(hashed.transform(clue for words in rows.test for clue in clues(words))))
    return [iob2([str(next(found)) for _ in words]) for words in rows.test]


def clues(words: Sequence[str]) -> list[list[str]]:
    lower = ["<", "<", *(word.lower() for word in words), ">", ">"]
    found = []
    for place, word in enumerate(words):
        around = [f"{step}={lower[place + 2 + step]}" for step in (-2, -1, 0, 1, 2)]
        shape = "".join(
            "X" if c.isupper() else "x" if c.islower() else "9" if c.isdigit() else c for c in word
        )
        own = lower[place + 2]
        found.append([*around, f"shape={shape[:8]}", f"end={own[-3:]}", f"start={own[:3]}"])
    return found


TFIDF = "TF-IDF and logistic regression"
TREES = (
    Baseline("histogram gradient boosting, all rows", trees, quick=False),
    Baseline("histogram gradient boosting, each site alone", trees, quick=False, alone=True),
)
BASELINES: dict[str, tuple[Baseline, ...]] = {
    "table": (Baseline("logistic regression on the columns", linear_on_table), *TREES),
    "regression": (Baseline("linear regression on the columns", linear_on_table), *TREES),
    "text": (Baseline(TFIDF, linear_on_texts),),
    "multilabel": (Baseline(TFIDF, linear_on_texts),),
    "image": (Baseline("logistic regression on pixels", linear_on_pixels),),
    "tokens": (
        Baseline("a dictionary of the train rows' words", dictionary),
        Baseline("logistic regression on words and their neighbours", linear_on_words, quick=False),
    ),
}
