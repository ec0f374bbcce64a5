"""How good predictions are, by task: accuracy, micro and macro F1, strict entity F1."""

from torch import Tensor


def measure(kind: str, predicted: Tensor, labels: Tensor, classes: tuple[str, ...]) -> dict[str, float]:
    """Metrics by name; both tensors have the labels' shape.

    image: accuracy. text: accuracy and macro F1. multilabel: f1 (micro) and macro F1. tokens: f1 of whole
    entities, which count only with the right type and both ends (seqeval, strict). language: the share of
    scored tokens that are predicted correctly, and how many were scored.
    """
    labels = labels.to(predicted.device)
    if kind == "language":
        scored = scored_tokens(labels)
        right, tokens = int(((predicted == labels) & scored).sum()), int(scored.sum())
        return {"accuracy": right / max(tokens, 1), "tokens": tokens}
    if kind == "multilabel":
        return {"f1": _f1(predicted, labels, "micro"), "f1_macro": _f1(predicted, labels, "macro")}
    if kind == "tokens":
        return {"f1": entity_f1(predicted, labels, classes)}
    metrics = {"accuracy": int((predicted == labels).sum()) / len(labels)}
    return metrics if kind == "image" else metrics | {"f1_macro": _f1(predicted, labels, "macro")}


def scored_tokens(labels: Tensor) -> Tensor:
    """Which tokens of a language model's rows count, (rows, tokens): all but a row's first can."""
    scored = labels >= 0
    scored[:, :1] = False
    return scored


def _f1(predicted: Tensor, labels: Tensor, average: str) -> float:
    from sklearn.metrics import f1_score  # lazy: takes a second, and pictures do without

    truth, guess = labels.cpu().numpy(), predicted.cpu().numpy()
    return float(f1_score(truth, guess, average=average, zero_division=0))


def entity_f1(predicted: Tensor, labels: Tensor, classes: tuple[str, ...]) -> float:
    from seqeval.metrics import f1_score
    from seqeval.scheme import IOB2

    truth, guess = tag_sequences(predicted, labels, classes)
    return float(f1_score(truth, guess, mode="strict", scheme=IOB2, zero_division=0))


def tag_sequences(
    predicted: Tensor, labels: Tensor, classes: tuple[str, ...]
) -> tuple[list[list[str]], list[list[str]]]:
    """(truth, prediction) as tag names, a list a row: one tag a word, where the word begins."""
    scored = (labels >= 0).cpu()
    truth, guess = [], []
    for mask, real, found in zip(scored, labels.cpu(), predicted.cpu(), strict=True):
        truth.append([classes[number] for number in real[mask].tolist()])
        guess.append([classes[number] for number in found[mask].tolist()])
    return truth, guess
