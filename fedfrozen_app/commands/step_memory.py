"""The memory of one client's training step, estimated without running it, or measured on request.

The model processes one batch on the meta device, where nothing is computed or stored, and the tensors saved
for backward are counted. With autocast (`client.precision=bf16`) part of that is half as large.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from fedfrozen_app.config import Config
from fedfrozen_app.core.client_order import Numbered
from fedfrozen_app.core.quantiles import LISTED
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.data.table import InputShape
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.batches import batches
from fedfrozen_app.local.sequential import eager_steps
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.models.attention_mask import with_attention_mask
from fedfrozen_app.models.task import Batch, Inputs, Parameters, Task
from fedfrozen_app.models.wrapper import wrapper_of
from fedfrozen_app.server.base import PlannedFedAvg
from fedfrozen_app.server.sampling import draw_cohort
from fedfrozen_app.tasks.target import target_of
from fedfrozen_app.vmap.attention import attention_by

STEPS = 3  # timed steps, after one warm-up step
OUTLINED = "fedfrozen_outlined"


class _Outlined(torch.autograd.Function):
    """Attention that computes nothing and saves what fused kernels save. On the meta device torch would
    choose an implementation that saves all attention weights."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        result = torch.empty_like(query)
        added = None if mask is None else mask.to(query.dtype)  # added to the scores, in the kernels' type
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:-1]), added)
        return result


def outlined_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **ignored: Any
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # repeat keys that serve several heads
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    return _Outlined.apply(query, key, value, mask).transpose(1, 2), None


AttentionInterface.register(OUTLINED, outlined_attention)
AttentionMaskInterface.register(OUTLINED, sdpa_mask)


@dataclass
class StepMemory:
    """Bytes at the peak of one client's step."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None  # None: this model cannot run on the meta device
    total: int

    @classmethod
    def of(cls, parameters: int, gradients: int, optimizer: int, activations: int | None) -> "StepMemory":
        total = parameters + gradients + optimizer + (activations or 0)
        return cls(parameters, gradients, optimizer, activations, total)


def step_memory(
    config: Config, shape: InputShape, trained: Collection[str], tokens: int = 0, chunks: int = 1
) -> StepMemory:
    """Memory of a step that trains these names, with a batch of rows of this many tokens (0: the maximum)."""
    model = wrapper_of(config).outline(config, shape)
    moving = 0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
        moving += parameter.nbytes if name in trained else 0
    moments = 2 if config.client.optimizer == "adamw" else int(config.client.momentum > 0)
    rows, gradients = config.client.batch_size * chunks, moving
    if config.privacy.name != "none":
        rows = min(rows, config.privacy.physical_batch)
        if config.privacy.clipping == "per_example":  # one per row, and their sum
            gradients = moving * (rows + 1)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    row = replace(shape, max_tokens=tokens or shape.max_tokens)
    return StepMemory.of(whole, gradients, moments * moving, kept_for_gradients(model, row, rows))


def kept_for_gradients(model: nn.Module, shape: InputShape, rows: int) -> int | None:
    """Bytes that a batch saves for backward, plus the largest of them again, for its gradient."""
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    again = [block for block in blocks if block.gradient_checkpointing]
    model.train()
    try:
        kept = _kept(model, shape, rows, again)
        if not again:
            return kept
        # With checkpointing: each block's input, and all activations of one recomputed block.
        for block in again:
            block.gradient_checkpointing = False
        return kept + (_kept(model, shape, rows, []) - kept) // len(again)
    except (RuntimeError, TypeError, ValueError):
        return None  # it depends on values, which the meta device lacks
    finally:
        for block in again:
            block.gradient_checkpointing = True


def _kept(model: nn.Module, shape: InputShape, rows: int, again: list[Any]) -> int:
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    found: dict[int, Any] = {}  # keeps tensors alive, so that no id is reused

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage
        return tensor

    def note_input(block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if isinstance(first := (*given, *named.values())[0], Tensor):
            note(first)

    hooks = [block.register_forward_pre_hook(note_input, with_kwargs=True) for block in again]
    try:
        with saved_tensors_hooks(note, lambda tensor: tensor), attention_by(model, OUTLINED):
            device = next(model.parameters()).device
            loss = _task(model, shape).loss({}, _batch(shape, rows, device))
    finally:
        for hook in hooks:
            hook.remove()
    del loss
    sizes = [storage.nbytes() for storage in found.values()]
    return sum(sizes) + max(sizes, default=0)


def _task(model: nn.Module, shape: InputShape) -> Task:
    def call(parameters: Parameters, inputs: Inputs) -> Tensor:
        return model(**with_attention_mask(inputs, model)).logits

    level = (1.0,) * shape.channels
    settings = shape.settings
    return Task(
        model, kind=shape.task, settings=settings, classes=shape.classes, mean=level, std=level, call=call
    )


def _batch(shape: InputShape, rows: int, device: torch.device) -> Batch:
    def numbers(*size: int) -> Tensor:
        return torch.ones(size, dtype=torch.int64, device=device)

    target = target_of(shape.task, shape.settings)
    if shape.is_table:
        inputs = {
            "numbers": torch.zeros(rows, shape.numbers, dtype=torch.float64, device=device),
            "categories": numbers(rows, len(shape.levels)) * 0,
        }
    elif shape.is_pictures:
        size = (rows, shape.channels, shape.image_size, shape.image_size)
        inputs = {"pixel_values": torch.zeros(size, dtype=torch.uint8, device=device)}
    else:
        inputs = {name: numbers(rows, shape.max_tokens) for name in ("input_ids", "attention_mask")}
    label = target.label_shape(len(shape.classes), shape.max_tokens, shape.image_size)
    return Batch(inputs, numbers(rows, *label))


@dataclass
class Measured:
    """Measurements of one client's real steps on this machine."""

    device: str
    seconds_a_step: float
    steps_a_round: int  # of all clients of the first round
    seconds_a_round: float  # for their steps, sequentially
    peak_bytes: int | None  # on a GPU; None elsewhere


def measure(config: Config, strategy: PlannedFedAvg, steps: int = STEPS) -> Measured:
    """Time a few plain steps with the plan of the first round, without the method's additions to the loss."""
    corpus = load_corpus(config)
    shares = share_out(corpus, config, config.num_clients)
    assert shares.partition is not None
    short = replace(config, client=replace(config.client, local_steps=1))
    worker = Worker(short, corpus, shares=shares)
    on_gpu = worker.device.type == "cuda"
    request = TrainRequest(1, strategy.client_plan(1), {})
    names = Numbered(len(shares.partition.indices))
    largest = np.argsort(-shares.partition.indices.sizes, kind="stable")[:LISTED]  # by their rows
    client = max((names[place] for place in sorted(largest)), key=lambda name: len(worker.rows(name).train))
    start = Start(dict(worker.parameters), request.plan.trained)
    eager_steps(worker, client, request, start)  # warm-up, not timed
    worker.config = replace(short, client=replace(short.client, local_steps=steps))
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    taken = eager_steps(worker, client, request, start)
    taken.losses.tolist()  # waits for the device
    each = (time.perf_counter() - began) / taken.count
    cohort = draw_cohort(names, config.participation, config.seed, 1)
    rows = {name: worker.rows(name).train for name in cohort}
    in_round = sum(len(batches(rows[name], config.client, config.seed, name, 1)) for name in cohort)
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return Measured(str(worker.device), each, in_round, each * in_round, peak)
