"""Attention with a squared loss: its exact gradients, and the closed-form value block.

    Z(H; Φ) = φ(H W_Q) φ(H W_K)ᵀ H / (L √r)          Φ = (W_Q, W_K), the kernel; linear attention
    Z(H; Φ) = softmax(H W_Q (H W_K)ᵀ / √r) H           row by row over the tokens; feature_map=softmax
    fᵢ(Φ, W) = ½ E ‖Z(H; Φ) W − Y‖²                    of client i, over the tokens of its sequences
    F(Φ, W)  = mean of fᵢ + λ/2 (‖Φ‖² + ‖W‖²)
    P(Φ)     = min_W F(Φ, W), at W*(Φ) = (mean of E[ZᵀZ] + λI)⁻¹ mean of E[ZᵀY]
    ∇P(Φ)    = ∂F/∂Φ at W*(Φ)                          (the envelope theorem)

Everything is batched: the first axis holds clients of any seed and setting. Sequences are the last axis.
Launching a product of 8x8 matrices costs far more than computing it, so sums within a sequence are written as
elementwise products over all sequences (`contract`); the rest are matrix products over all tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SOFTMAX = "softmax"
FEATURE_MAPS = ("identity", "elu+1", "relu", SOFTMAX)


def feature(name: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """φ(x) and φ'(x); None where the derivative is one."""
    if name == "identity":
        return x, None
    if name == "relu":
        return x.relu(), (x > 0).to(x)
    low = x.clamp(max=0).exp()  # elu(x) + 1 is exp(x) below zero, and so is its derivative
    return torch.where(x > 0, x + 1, low), low


def contract(x: Tensor, y: Tensor, axis: int) -> Tensor:
    """Σ over one axis of x · y; the other axes broadcast."""
    (first, *xs), (second, *ys) = x.unbind(axis), y.unbind(axis)
    total = first * second
    for a, b in zip(xs, ys, strict=True):
        total.addcmul_(a, b)
    return total


@dataclass(frozen=True)
class Moments:
    """The moments of clients' data under a kernel: fᵢ(W) = ½(tr WᵀAW − 2 tr BᵀW + c)."""

    square: Tensor  # (…, d, d) A = E[ZᵀZ]
    cross: Tensor  # (…, d, o) B = E[ZᵀY]
    target: Tensor  # (…) c = E‖Y‖²

    def mean(self, axis: int) -> "Moments":
        """The mean over one of the leading axes."""
        return Moments(self.square.mean(axis), self.cross.mean(axis), self.target.mean(axis))

    def loss(self, value: Tensor) -> Tensor:
        quadratic = (value * (self.square @ value - 2 * self.cross)).sum((-2, -1))
        return (quadratic + self.target) / 2

    def best_value(self, ridge: float) -> Tensor:
        """W*, the solution of (A + λI) W = B."""
        eye = torch.eye(self.square.shape[-1], dtype=self.square.dtype)
        return torch.linalg.solve(self.square + ridge * eye, self.cross)


@dataclass(frozen=True)
class Data:
    """Sequences of b clients, (b, d, tokens, sequences), and their targets, (b, o, …)."""

    inputs: Tensor
    targets: Tensor
    feature_map: str = "identity"

    def __getitem__(self, index: Tensor) -> "Data":
        return Data(self.inputs[index], self.targets[index], self.feature_map)

    @property
    def flat(self) -> Tensor:
        """(b, d, all tokens)."""
        return self.inputs.flatten(2)

    @property
    def tokens(self) -> int:
        return self.inputs.shape[2] * self.inputs.shape[3]


def _features(data: Data, kernel: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """φ of queries and keys, (b, 2r, tokens, n), its derivative, and Kᵀ H of every sequence, (b, d, r, n)."""
    batch, _, length, count = data.inputs.shape
    rank = kernel.shape[-1] // 2
    before = torch.bmm(kernel.mT, data.flat).view(batch, 2 * rank, length, count)
    after, derivative = feature(data.feature_map, before)
    scale = 1 / (length * rank**0.5)
    memory = contract(data.inputs.unsqueeze(2), after[:, rank:].unsqueeze(1), 3).mul_(scale)
    return after, derivative, memory


def _weights(data: Data, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, (b, 2r, tokens, n), and attention weights, (b, tokens, tokens, n)."""
    batch, _, length, count = data.inputs.shape
    rank = kernel.shape[-1] // 2
    before = torch.bmm(kernel.mT, data.flat).view(batch, 2 * rank, length, count)
    scores = contract(before[:, :rank].unsqueeze(3), before[:, rank:].unsqueeze(2), 1)
    return before, torch.softmax(scores.mul_(rank**-0.5), dim=2)


def attend(data: Data, kernel: Tensor) -> Tensor:
    """Z(H; Φ) of every token: (b, d, all tokens). The kernel, (b, d, 2r), is W_Q and W_K concatenated."""
    if data.feature_map == SOFTMAX:
        _, weights = _weights(data, kernel)
        return contract(weights.unsqueeze(1), data.inputs.unsqueeze(2), 3).flatten(2)
    after, _, memory = _features(data, kernel)
    queries = after[:, : kernel.shape[-1] // 2]
    return contract(memory.unsqueeze(3), queries.unsqueeze(1), 2).flatten(2)


def moments(data: Data, kernel: Tensor) -> Moments:
    z, y = attend(data, kernel), data.targets.flatten(2)
    target = data.targets.square().sum((1, 2, 3)) / data.tokens
    return Moments(torch.bmm(z, z.mT) / data.tokens, torch.bmm(z, y.mT) / data.tokens, target)


def loss(data: Data, kernel: Tensor, value: Tensor) -> Tensor:
    """fᵢ of every client, (b,), without the ridge."""
    residual = torch.bmm(value.mT, attend(data, kernel)) - data.targets.flatten(2)
    return residual.square().sum((1, 2)) / (2 * data.tokens)


def gradients(data: Data, kernel: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """∂fᵢ/∂Φ, (b, d, 2r), and ∂fᵢ/∂W, (b, d, o), of every client, without the ridge."""
    if data.feature_map == SOFTMAX:
        return _softmax_gradients(data, kernel, value)
    after, derivative, memory = _features(data, kernel)
    batch, _, rank, count = memory.shape
    outputs = value.shape[-1]
    queries = after[:, :rank]
    # The output of a token is q (Kᵀ H W): (b, o, r, n) first, then one sum over r.
    reading = torch.bmm(value.mT, memory.flatten(2)).view(batch, outputs, rank, count)
    residual = contract(reading.unsqueeze(3), queries.unsqueeze(1), 2).sub_(data.targets)
    residual.div_(data.tokens)
    to_reading = contract(residual.unsqueeze(2), queries.unsqueeze(1), 3)  # (b, o, r, n)
    to_value = torch.bmm(memory.flatten(2), to_reading.flatten(2).mT)
    to_memory = torch.bmm(value, to_reading.flatten(2)).view(memory.shape)
    to_features = torch.empty_like(after)
    to_features[:, :rank] = contract(reading.unsqueeze(3), residual.unsqueeze(2), 1)
    to_features[:, rank:] = contract(to_memory.unsqueeze(3), data.inputs.unsqueeze(2), 1)
    to_features[:, rank:] /= data.inputs.shape[2] * rank**0.5
    if derivative is not None:
        to_features.mul_(derivative)
    return torch.bmm(data.flat, to_features.flatten(2).mT), to_value


def _softmax_gradients(data: Data, kernel: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    before, weights = _weights(data, kernel)
    rank, outputs = kernel.shape[-1] // 2, value.shape[-1]
    # The output of a token is a weighted mean of all tokens' H W: (b, o, tokens, n).
    offered = torch.bmm(value.mT, data.flat).view(len(value), outputs, *data.inputs.shape[2:])
    residual = contract(weights.unsqueeze(1), offered.unsqueeze(2), 3).sub_(data.targets).div_(data.tokens)
    to_offered = contract(weights.unsqueeze(1), residual.unsqueeze(3), 2)
    to_weights = contract(residual.unsqueeze(3), offered.unsqueeze(2), 1)
    to_scores = weights * (to_weights - (weights * to_weights).sum(2, keepdim=True))
    to_before = torch.empty_like(before)
    to_before[:, :rank] = contract(to_scores.unsqueeze(1), before[:, rank:].unsqueeze(2), 3)
    to_before[:, rank:] = contract(to_scores.unsqueeze(1), before[:, :rank].unsqueeze(3), 2)
    to_before.mul_(rank**-0.5)
    return torch.bmm(data.flat, to_before.flatten(2).mT), torch.bmm(data.flat, to_offered.flatten(2).mT)
