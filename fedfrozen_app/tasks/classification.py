"""Classification: one class per row, for images, texts and tables."""

import numpy as np
from torch import Tensor
from torch.nn import functional

from fedfrozen_app.tasks.target import Target


class ImageClass(Target):
    """Single-label classification, measured by accuracy."""

    reads_pictures = True

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits, labels, reduction="none")

    def batch_loss(
        self, logits: Tensor, labels: Tensor, class_weights: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        if mask is None:
            return functional.cross_entropy(logits, labels, weight=class_weights)
        return super().batch_loss(logits, labels, class_weights, mask)

    def measure(self, predicted: Tensor, labels: Tensor, classes: tuple[str, ...]) -> dict[str, float]:
        labels = labels.to(predicted.device)
        return {"accuracy": int((predicted == labels).sum()) / len(labels)}

    def trivial(self, labels: Tensor) -> dict[str, float]:
        if not len(labels):
            return {}
        return {"majority_accuracy": float(labels.unique(return_counts=True)[1].max()) / len(labels)}


class TextClass(ImageClass):
    """Single-label classification, measured by accuracy and macro F1."""

    metric_names = ("accuracy", "f1_macro")
    reads_pictures = False

    def measure(self, predicted: Tensor, labels: Tensor, classes: tuple[str, ...]) -> dict[str, float]:
        found = super().measure(predicted, labels, classes)
        return found | {"f1_macro": f1(predicted, labels, "macro")}


def f1(predicted: Tensor, labels: Tensor, average: str) -> float:
    truth, guess = labels.cpu().numpy(), predicted.cpu().numpy()
    if average == "macro" and truth.ndim == 1 and truth.dtype.kind in "iu" and len(truth):
        return macro_f1(truth, guess)
    from sklearn.metrics import f1_score  # lazy: takes a second, and images do not need it

    return float(f1_score(truth, guess, average=average, zero_division=0))


def macro_f1(truth: np.ndarray, guess: np.ndarray) -> float:
    """scikit-learn's `f1_score(truth, guess, average="macro")` for numbered classes, to the bit. For few rows
    scikit-learn takes 7 ms, mostly for checks."""
    classes = int(max(truth.max(), guess.max())) + 1
    there, guessed = np.bincount(truth, minlength=classes), np.bincount(guess, minlength=classes)
    right = np.bincount(truth[truth == guess], minlength=classes)
    known = there + guessed > 0
    return float(np.average(2.0 * right[known] / (there + guessed)[known]))
