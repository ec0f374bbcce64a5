"""Long texts in chunks: the model reads each chunk separately, and logits are averaged over chunks.

Inputs in chunks are (texts, chunks, tokens). Empty chunks have one token (data/sources/text.py) and are
ignored.
"""

from collections.abc import Mapping

from torch import Tensor


def chunks_apart(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each chunk as a separate row; other inputs unchanged."""
    return {name: value.flatten(0, 1) if _in_chunks(inputs) else value for name, value in inputs.items()}


def chunks_together(values: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """(texts * chunks, ...) to (texts, ...): the mean over the chunks that have text. `inputs` are those
    before `chunks_apart`."""
    if not _in_chunks(inputs):
        return values
    counts = inputs["attention_mask"].sum(dim=-1) > 1  # (texts, chunks)
    first = counts.new_zeros(counts.shape[1])
    first[0] = True
    counts = counts | first  # also for a text of one token
    weight = counts.to(values.dtype) / counts.sum(dim=1, keepdim=True)
    each = values.unflatten(0, counts.shape)
    return (each * weight.reshape(*counts.shape, *(1 for _ in values.shape[1:]))).sum(dim=1)


def _in_chunks(inputs: Mapping[str, Tensor]) -> bool:
    return "input_ids" in inputs and inputs["input_ids"].ndim == 3
