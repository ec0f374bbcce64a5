"""From a batch to a loss: the part that every client algorithm and every runner shares."""

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedfrozen_app.data.table import IGNORED, Table
from fedfrozen_app.errors import UserError
from fedfrozen_app.models.meanwhile import judging
from fedfrozen_app.models.metrics import measure

Parameters = Mapping[str, Tensor]
Inputs = dict[str, Tensor]
PIXELS = 2**23  # that a GPU judges at once
SCORES = 2**26  # of tokens by vocabulary, that are judged at once


@dataclass(frozen=True)
class Batch:
    inputs: Inputs
    # (batch,), several labels as 0 and 1 (batch, classes), or tags or tokens to foretell (batch, tokens)
    labels: Tensor
    class_weights: Tensor | None = None  # (classes,)
    mask: Tensor | None = None  # (batch,) 1 for an example, 0 for padding; None: all are examples


_shares: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def called(model: nn.Module, parameters: Parameters, inputs: Inputs) -> Tensor:
    """What the model says with these parameters in place of its own; those not named are as they are.

    Arrays under two names have both from the beginning: torch would look for them in every call."""
    if model not in _shares:
        own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        _shares[model] = len({id(array) for _, array in own}) < len(own)
    ties = _shares[model]
    return functional_call(model, dict(parameters), args=(), kwargs=inputs, tie_weights=ties).logits


def perplexity(loss: float) -> float:
    """Of a mean loss over tokens; as large as it may be where it would be too large for a number."""
    return math.exp(min(loss, 700.0))


class Task:
    """Classification of rows or of tokens with one model, or foretelling the next token.

    `call` says how parameters meet the model. By default, `loaded` are the model's own parameters, as they
    are: with these a step swaps nothing. Any others take the places of those they name for the length of the
    call.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
        precision: str = "float32",
        kind: str = "image",
        classes: tuple[str, ...] = (),
        loaded: Parameters | None = None,
        head: nn.Module | None = None,
        call: Callable[[Parameters, Inputs], Tensor] | None = None,
    ) -> None:
        self.model, self.kind, self.classes = model, kind, classes
        # The figure that rounds are compared by; a row may have others beside it.
        self.headline = "f1" if kind in ("multilabel", "tokens") else "accuracy"
        first = next(model.parameters())
        # A frozen base may be coarser than what trains beside it.
        self.device = first.device
        self.dtype = reduce(torch.promote_types, {value.dtype for value in model.parameters()})
        # A loss over a large vocabulary has no digits left in bfloat16.
        coarse = kind == "language" and self.dtype is torch.bfloat16
        self._scores = torch.float32 if coarse else self.dtype
        self.bf16 = precision == "bf16"
        self._loaded, self._head = loaded, head
        self.call = call or self._call
        if mean:  # (uint8/255 − mean)/std as one multiplication and one addition, (1, channels, 1, 1)
            shift, scale = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (mean, std))
            self._scale = (1 / (255 * scale)).to(self.device, self.dtype)
            self._shift = (-shift / scale).to(self.device, self.dtype)

    def _call(self, parameters: Parameters, inputs: Inputs) -> Tensor:
        if parameters is self._loaded:
            return self.model(**inputs).logits
        return called(self.model, parameters, inputs)

    def prepare(self, inputs: Inputs) -> Inputs:
        """Pictures rest as bytes and are normalised here, on the device."""
        if "pixel_values" not in inputs:
            return inputs
        pixels = inputs["pixel_values"].to(self.dtype)
        return {**inputs, "pixel_values": torch.addcmul(self._shift, pixels, self._scale)}

    def loss(self, parameters: Parameters, batch: Batch) -> Tensor:
        """The batch's mean for the model with these parameters; those not named are as they are loaded."""
        return self.loss_of(self.logits(parameters, batch), batch)

    def logits(self, parameters: Parameters, batch: Batch) -> Tensor:
        with self._autocast():
            return self.call(parameters, self.prepare(batch.inputs)).to(self._scores)

    def answer(self, parameters: Parameters, **asked: bool) -> Tensor:
        """What the model says of itself, where it has such an answer: no row is looked at."""
        with self._autocast():
            return self.call(parameters, asked).to(self.dtype)  # type: ignore[arg-type]

    def features(self, parameters: Parameters, batch: Batch) -> tuple[Tensor, Tensor]:
        """(logits, what the head read to give them): a row's representation."""
        if self._head is None:
            raise UserError("This model has no head of its own, and so no representation before it.")
        read: list[Tensor] = []
        hook = self._head.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
        try:
            logits = self.logits(parameters, batch)
        finally:
            hook.remove()
        return logits, read[-1].to(self.dtype)

    def loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        if batch.mask is None and batch.labels.ndim == 1:
            return functional.cross_entropy(logits, batch.labels, weight=batch.class_weights)
        each = self.losses(logits, batch.labels)
        weight = batch.mask
        if self.kind == "language":  # a mean over tokens: a row counts by how many it has
            tokens = self._tokens(batch.labels)
            weight = tokens if weight is None else weight * tokens
        if weight is None:
            return each.mean()
        # The same mean over the real examples; a batch of padding alone gives 0 and no gradient.
        if batch.class_weights is not None and batch.labels.ndim == 1:
            weight = weight * batch.class_weights[batch.labels]
        return (each * weight).sum() / weight.sum().clamp(min=torch.finfo(self.dtype).tiny)

    def losses_of(self, table: Table) -> Tensor:
        """(examples,) of the model as it is loaded now, to be differentiated."""
        with self._autocast():
            logits = self.model(**self.prepare(table.inputs)).logits
        return self.losses(logits.to(self._scores), table.labels)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(examples,): each example's own loss, whatever stands beside it in the batch."""
        if self.kind == "multilabel":
            every = functional.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none")
            return every.mean(dim=1)
        if self.kind == "tokens":
            judged = labels >= 0  # (examples, tokens)
            target = labels.clamp(min=IGNORED)
            every = functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
            return every.sum(dim=1) / judged.sum(dim=1).clamp(min=1)
        if self.kind == "language":
            target = labels[:, 1:]  # (examples, tokens − 1): each is foretold by what stands before it
            scores = logits[:, :-1].reshape(-1, logits.shape[-1])
            every = functional.cross_entropy(scores, target.reshape(-1), reduction="none")
            return every.view(target.shape).sum(dim=1) / self._tokens(labels).clamp(min=1)
        return functional.cross_entropy(logits, labels, reduction="none")

    def _tokens(self, labels: Tensor) -> Tensor:
        """(examples,): how many tokens of each count."""
        return (labels[:, 1:] >= 0).sum(dim=1).to(self._scores)

    def with_call(self, call: Callable[[Parameters, Inputs], Tensor]) -> "Task":
        """The same task with another way for parameters to meet the model."""
        twin = copy.copy(self)
        twin.call = call
        return twin

    def evaluate(self, table: Table) -> dict[str, float]:
        """Mean loss and figures of the model as it is loaded now; of a language model over tokens."""
        loss, predicted = self.predict(table, self.rows_at_once(table))
        found = {"loss": loss, **measure(self.kind, predicted, table.labels, self.classes)}
        return found | {"perplexity": perplexity(loss)} if self.kind == "language" else found

    def said(self, logits: Tensor) -> Tensor:
        """What the model says of rows with these logits, shaped like their labels."""
        if self.kind == "language":  # where a token stands, what was foretold for it
            return functional.pad(logits[:, :-1].argmax(dim=-1), (1, 0))
        return logits > 0 if self.kind == "multilabel" else logits.argmax(dim=-1)

    def rows_at_once(self, table: Table) -> int:
        """On a GPU small pictures are judged by the thousand: a batch costs its launches, not its rows."""
        if self.kind == "language":
            config: Any = self.model.config
            return min(512, max(1, SCORES // (table.labels.shape[1] * config.vocab_size)))
        pixels = table.inputs.get("pixel_values")
        if pixels is None or not len(table) or self.device.type != "cuda":
            return 512
        return max(512, PIXELS // pixels[0].numel())

    @torch.inference_mode()
    def predict(self, table: Table, batch_size: int = 512) -> tuple[float, Tensor]:
        """Mean loss, and what the model says: shaped like the labels, on the model's device."""
        # Sums stay on the device: one look at the end instead of one a batch.
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        count = torch.zeros_like(loss)
        said: list[Tensor] = []
        with judging(self.model):
            for start in range(0, len(table), batch_size):
                part = slice(start, start + batch_size)
                labels = table.labels[part].to(self.device)
                inputs = {key: value[part].to(self.device) for key, value in table.inputs.items()}
                with self._autocast():
                    logits = self.model(**self.prepare(inputs)).logits
                logits = logits.to(self._scores)
                each = self.losses(logits, labels).double()
                if self.kind == "language":
                    tokens = self._tokens(labels).double()
                    each, count = each * tokens, count + tokens.sum()
                else:
                    count += len(labels)
                said.append(self.said(logits))
                loss += each.sum()
        return float(loss / count.clamp(min=1)), torch.cat(said)

    @torch.inference_mode()
    def probabilities(self, table: Table, batch_size: int = 512) -> Tensor:
        """(rows, classes), or (rows, tokens, classes): of the model as it is loaded now, on the host."""
        found: list[Tensor] = []
        with judging(self.model):
            for start in range(0, len(table), batch_size):
                inputs = {
                    key: v[start : start + batch_size].to(self.device) for key, v in table.inputs.items()
                }
                with self._autocast():
                    logits = self.model(**self.prepare(inputs)).logits
                logits = logits.to(self.dtype).float()
                found.append(
                    (logits.sigmoid() if self.kind == "multilabel" else logits.softmax(dim=-1)).cpu()
                )
        return torch.cat(found)

    @torch.inference_mode(False)
    @torch.no_grad()
    def encoded(self, table: Table, encode: Callable[[Tensor], Tensor], batch_size: int = 512) -> Table:
        """The table with features in place of pictures: (rows, width)."""
        parts = []
        for start in range(0, len(table), batch_size):
            inputs = {key: value[start : start + batch_size] for key, value in table.inputs.items()}
            with self._autocast():
                parts.append(encode(self.prepare(inputs)["pixel_values"]).to(self.dtype))
        return Table({"image_features": torch.cat(parts)}, table.labels)

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()
