"""From a batch to a loss: the part that every client algorithm and every runner shares."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import Table
from fedfrozen_app.models.chunks import chunks_apart, chunks_together
from fedfrozen_app.tasks.target import NOTHING, target_of
from fedfrozen_app.vmap.model_modes import evaluation_mode

Parameters = Mapping[str, Tensor]
Inputs = dict[str, Tensor]
PIXELS = 2**23  # evaluated at once on a GPU
SCORES = 2**26  # tokens times vocabulary, evaluated at once


@dataclass(frozen=True)
class Batch:
    inputs: Inputs
    # As the kind of target holds them: (batch,), several labels as 0 and 1 (batch, classes), tags or tokens
    # to
    # predict (batch, tokens), time and event (batch, 2), or each pixel's class (batch, height, width)
    labels: Tensor
    class_weights: Tensor | None = None  # (classes,)
    mask: Tensor | None = None  # (batch,) 1 for an example, 0 for padding; None: no padding


_shares: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def call_model(model: nn.Module, parameters: Parameters, inputs: Inputs) -> Tensor:
    """The logits of the model with these parameters in place of its own; others are unchanged.

    Checks for tied parameters once, where torch would in every call."""
    if model not in _shares:
        own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        _shares[model] = len({id(array) for _, array in own}) < len(own)
    ties = _shares[model]
    return functional_call(model, dict(parameters), args=(), kwargs=inputs, tie_weights=ties).logits


class Normalisation:
    """(uint8/255 − mean)/std as one multiplication and one addition, (1, channels, 1, 1)."""

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
    ) -> None:
        shift, scale = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (mean, std))
        self._scale = (1 / (255 * scale)).to(device, dtype)
        self._shift = (-shift / scale).to(device, dtype)

    def __call__(self, pixels: Tensor) -> Tensor:
        return torch.addcmul(self._shift, pixels, self._scale)


class Task:
    """One model and what it predicts (`target`): a class, tags, the next token, a number, a survival time.

    `call` runs the model with given parameters. `loaded` are by default the model's own, which need no swap.
    Others replace the model's for the duration of the call.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
        precision: str = "float32",
        kind: str = "image",
        settings: Mapping[str, Any] = NOTHING,
        classes: tuple[str, ...] = (),
        loaded: Parameters | None = None,
        head: nn.Module | None = None,
        call: Callable[[Parameters, Inputs], Tensor] | None = None,
    ) -> None:
        self.model, self.kind, self.classes = model, kind, classes
        self.target = target_of(kind, settings)
        first = next(model.parameters())
        # A frozen base may have lower precision than the trained parameters.
        self.device = first.device
        self.dtype = reduce(torch.promote_types, {value.dtype for value in model.parameters()})
        coarse = self.target.exact_scores and self.dtype is torch.bfloat16
        self._scores = torch.float32 if coarse else self.dtype
        self.bf16 = precision == "bf16"
        self._loaded, self._head = loaded, head
        self.call = call or self._call
        self._normalise = Normalisation(mean, std, self.device, self.dtype) if mean else None

    @property
    def headline(self) -> str:
        """The metric by which rounds are compared; a row may have others."""
        return self.target.headline

    def _call(self, parameters: Parameters, inputs: Inputs) -> Tensor:
        if parameters is self._loaded:
            return self.model(**inputs).logits
        return call_model(self.model, parameters, inputs)

    def prepare(self, inputs: Inputs) -> Inputs:
        """Prepare inputs on the device: normalise images, which are stored as bytes; turn a text's chunks
        into rows; cast a table's numbers to the model's precision."""
        if "numbers" in inputs:
            return {**inputs, "numbers": inputs["numbers"].to(self.dtype)}
        if "pixel_values" not in inputs:
            return chunks_apart(inputs)
        assert self._normalise is not None
        return {**inputs, "pixel_values": self._normalise(inputs["pixel_values"].to(self.dtype))}

    def loss(self, parameters: Parameters, batch: Batch) -> Tensor:
        """The batch's mean loss for the model with these parameters; others are the loaded ones."""
        return self.loss_of(self.logits(parameters, batch), batch)

    def logits(self, parameters: Parameters, batch: Batch) -> Tensor:
        with self._autocast():
            found = self.call(parameters, self.prepare(batch.inputs)).to(self._scores)
        return chunks_together(found, batch.inputs) if "input_ids" in batch.inputs else found

    def output_without_batch(self, parameters: Parameters, **flags: bool) -> Tensor:
        """The model's output for flags without any row, if it has such an output."""
        with self._autocast():
            return self.call(parameters, flags).to(self.dtype)  # type: ignore[arg-type]

    def answer(self, parameters: Parameters, **asked: bool) -> Tensor:
        """Deprecated: the old name of `output_without_batch`."""
        warnings.warn("Task.answer is now output_without_batch.", DeprecationWarning, stacklevel=2)
        return self.output_without_batch(parameters, **asked)

    def features(self, parameters: Parameters, batch: Batch) -> tuple[Tensor, Tensor]:
        """(logits, the head's input): a row's representation."""
        if self._head is None:
            raise UserError("This model has no head of its own, and so no representation before it.")
        read: list[Tensor] = []
        hook = self._head.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
        try:
            logits = self.logits(parameters, batch)
        finally:
            hook.remove()
        return logits, chunks_together(read[-1], batch.inputs).to(self.dtype)

    def loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        return self.target.batch_loss(logits, batch.labels, batch.class_weights, batch.mask)

    def losses_of(self, table: Table) -> Tensor:
        """(examples,): losses of the loaded model, differentiable."""
        with self._autocast():
            logits = self.model(**self.prepare(table.inputs)).logits
        logits = chunks_together(logits, table.inputs)
        return self.losses(logits.to(self._scores), table.labels)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(examples,): each example's loss, independent of the rest of the batch."""
        return self.target.losses(logits, labels)

    def with_call(self, call: Callable[[Parameters, Inputs], Tensor]) -> "Task":
        """The same task with another way to run the model."""
        twin = copy.copy(self)
        twin.call = call
        return twin

    def noting(self) -> tuple["Task", list[Tensor]]:
        """The same task, and a list to which it adds each loss that `loss_of` computes, detached."""
        twin, found = copy.copy(self), list[Tensor]()

        def loss_of(logits: Tensor, batch: Batch) -> Tensor:
            loss = self.loss_of(logits, batch)
            found.append(loss.detach())
            return loss

        twin.loss_of = loss_of  # type: ignore[method-assign]
        return twin, found

    def evaluate(self, table: Table) -> dict[str, float]:
        """Mean loss and metrics of the loaded model; for a language model over tokens."""
        loss, predicted = self.predict(table, self.rows_at_once(table))
        found = {"loss": loss, **self.target.measure(predicted, table.labels, self.classes)}
        return found | self.target.of_loss(loss)

    def predictions(self, logits: Tensor) -> Tensor:
        """The predictions from these logits, shaped like the labels."""
        return self.target.predictions(logits)

    def rows_at_once(self, table: Table) -> int:
        """The batch size of evaluation. On a GPU small images are evaluated by the thousand: the cost is in
        launches, not rows."""
        if self.target.over_tokens and not self.classes:  # one score per token of the vocabulary
            config: Any = self.model.config
            return min(512, max(1, SCORES // (table.labels.shape[1] * config.vocab_size)))
        pixels = table.inputs.get("pixel_values")
        if pixels is None or not len(table) or self.device.type != "cuda":
            return 512
        return max(512, PIXELS // pixels[0].numel())

    @torch.inference_mode()
    def predict(self, table: Table, batch_size: int = 512) -> tuple[float, Tensor]:
        """Mean loss, and the predictions: shaped like the labels, on the model's device."""
        # Sums stay on the device: one transfer at the end instead of one per batch.
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        count = torch.zeros_like(loss)
        predicted: list[Tensor] = []
        compared: list[Tensor] = []  # logits of rows whose losses depend on each other
        with evaluation_mode(self.model):
            for start in range(0, len(table), batch_size):
                part = slice(start, start + batch_size)
                labels = table.labels[part].to(self.device)
                inputs = {key: value[part].to(self.device) for key, value in table.inputs.items()}
                with self._autocast():
                    logits = self.model(**self.prepare(inputs)).logits
                logits = chunks_together(logits.to(self._scores), inputs)
                predicted.append(self.predictions(logits))
                if not self.target.per_example:
                    compared.append(logits)
                    continue
                each = self.losses(logits, labels).double()
                if (weights := self.target.weights(labels, self._scores)) is not None:
                    each, count = each * weights.double(), count + weights.double().sum()
                else:
                    count += len(labels)
                loss += each.sum()
        if compared:
            labels = table.labels.to(self.device)
            return float(self.target.batch_loss(torch.cat(compared), labels, None, None)), torch.cat(
                predicted
            )
        return float(loss / count.clamp(min=1)), torch.cat(predicted)

    @torch.inference_mode()
    def probabilities(self, table: Table, batch_size: int = 512) -> Tensor:
        """(rows, classes), or (rows, tokens, classes): of the loaded model, on the host."""
        return torch.cat([self.target.probabilities(each).cpu() for each in self._batches(table, batch_size)])

    @torch.inference_mode()
    def all_logits(self, table: Table, batch_size: int = 512) -> Tensor:
        """The logits of the same rows."""
        return torch.cat([each.cpu() for each in self._batches(table, batch_size)])

    def _batches(self, table: Table, batch_size: int) -> Iterator[Tensor]:
        with evaluation_mode(self.model):
            for start in range(0, len(table), batch_size):
                inputs = {
                    key: v[start : start + batch_size].to(self.device) for key, v in table.inputs.items()
                }
                with self._autocast():
                    logits = self.model(**self.prepare(inputs)).logits
                yield chunks_together(logits.to(self.dtype), inputs).float()

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
