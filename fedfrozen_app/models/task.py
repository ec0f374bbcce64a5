"""From a batch to a loss: the part that every client algorithm and every runner shares."""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedfrozen_app.data.table import Table

Parameters = Mapping[str, Tensor]
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    inputs: Inputs
    labels: Tensor  # (batch,)
    class_weights: Tensor | None = None  # (classes,)
    mask: Tensor | None = None  # (batch,) 1 for an example, 0 for padding; None: all are examples


class Task:
    """Classification with one model. `call` says how parameters meet the model.

    By default the parameters are the model's own, already loaded: nothing is swapped in a step.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
        precision: str = "float32",
        call: Callable[[Parameters, Inputs], Tensor] | None = None,
    ) -> None:
        self.model = model
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.bf16 = precision == "bf16"
        self.call = call or (lambda parameters, inputs: model(**inputs).logits)
        if mean:  # (uint8/255 − mean)/std as one multiplication and one addition, (1, channels, 1, 1)
            shift, scale = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (mean, std))
            self._scale = (1 / (255 * scale)).to(first)
            self._shift = (-shift / scale).to(first)

    def prepare(self, inputs: Inputs) -> Inputs:
        """Pictures rest as bytes and are normalised here, on the device."""
        if "pixel_values" not in inputs:
            return inputs
        pixels = inputs["pixel_values"].to(self.dtype)
        return {**inputs, "pixel_values": torch.addcmul(self._shift, pixels, self._scale)}

    def loss(self, parameters: Parameters, batch: Batch) -> Tensor:
        with self._autocast():
            logits = self.call(parameters, self.prepare(batch.inputs))
        logits = logits.to(self.dtype)
        if batch.mask is None:
            return functional.cross_entropy(logits, batch.labels, weight=batch.class_weights)
        # The same mean over the real examples; a batch of padding alone gives 0 and no gradient.
        weight = batch.mask
        if batch.class_weights is not None:
            weight = weight * batch.class_weights[batch.labels]
        each = functional.cross_entropy(logits, batch.labels, reduction="none")
        return (each * weight).sum() / weight.sum().clamp(min=torch.finfo(self.dtype).tiny)

    def with_call(self, call: Callable[[Parameters, Inputs], Tensor]) -> "Task":
        """The same task with another way for parameters to meet the model."""
        twin = copy.copy(self)
        twin.call = call
        return twin

    @torch.inference_mode()
    def evaluate(self, table: Table, batch_size: int = 512) -> dict[str, float]:
        """Mean loss and accuracy of the model as it is loaded now."""
        was_training = self.model.training
        self.model.eval()
        # Sums stay on the device: one look at the end instead of one a batch.
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        for start in range(0, len(table), batch_size):
            part = slice(start, start + batch_size)
            labels = table.labels[part].to(self.device)
            inputs = {key: value[part].to(self.device) for key, value in table.inputs.items()}
            with self._autocast():
                logits = self.model(**self.prepare(inputs)).logits
            logits = logits.to(self.dtype)
            loss += functional.cross_entropy(logits, labels, reduction="sum").double()
            right += (logits.argmax(dim=-1) == labels).sum()
        self.model.train(was_training)
        return {"loss": float(loss) / len(table), "accuracy": int(right) / len(table)}

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()
