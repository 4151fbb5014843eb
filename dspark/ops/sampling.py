"""From logits to tokens: shaped laws, keyed Gumbel-argmax, uniforms, log-probabilities. All fp32, each row alone.

Drawing has no gradient; a law and its log-probabilities have. On the kept support S of a law p at temperature T,
d ln p_i / d logit_j = (1[i = j] - p_j) / T for j in S and 0 elsewhere: the support is held fixed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.ops.backend import backend, kernels, recording
from dspark.ops.linear import plain_backward, wide


def shape_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The law a token is drawn from: logits[N, V] fp32 -> probabilities [N, V] fp32, zero off the support.

    softmax(logits / temperature), then the top_k largest (0 = all), then the shortest prefix of the largest with
    mass >= top_p of what is left (1 = all), then p >= min_p * max; renormalised. Ties: lower token id first.
    Temperature 0: one-hot at the lowest-id argmax. temperature, top_p, min_p [N] fp32; top_k [N] int64.
    Raises DsparkError when a row holds NaN, +inf or no finite logit. Reference: dspark.probability.shape.
    """
    if recording(logits):
        return _ShapeProbs.apply(logits, temperature, top_k, top_p, min_p)
    return backend(logits).shape_probs(logits, temperature, top_k, top_p, min_p)


def gumbel_argmax(
    probs: Tensor, seeds: Tensor, stream: int, positions: Tensor, token_ids: Tensor | None = None
) -> Tensor:
    """argmax over the support of ln p + G(seed, stream, position, token id) -> column index [N] int64.

    probs[N, V] fp32 (need not sum to one); seeds, positions [N] int64; token_ids[V] int64 ascending maps columns to
    vocabulary ids, None: column = id. Ties go to the lower column. Raises DsparkError when a row has no support.
    """
    return kernels(probs).gumbel_argmax(probs, seeds, stream, positions, token_ids)


def uniform(seeds: Tensor, stream: int, positions: Tensor) -> Tensor:
    """One number in (0, 1) per row, of 23 bits: [N] fp32, a function of (seed, stream, position) alone."""
    return kernels(seeds).uniform(seeds, stream, positions)


def log_softmax(logits: Tensor) -> Tensor:
    """ln softmax(logits[N, V]) fp32 -> [N, V] fp32. Raises DsparkError as shape_probs does."""
    if recording(logits):
        return _LogSoftmax.apply(logits)
    return backend(logits).log_softmax(logits)


def raw_logprob(logits: Tensor, ids: Tensor) -> Tensor:
    """log_softmax(logits[N, V])[n, ids[n]] at temperature 1 -> [N] fp32, the same bits as log_softmax's entry without
    writing the others. Raises DsparkError as shape_probs does."""
    if recording(logits):
        return _RawLogprob.apply(logits, ids)
    return backend(logits).raw_logprob(logits, ids)


def log_of(probs: Tensor, ids: Tensor) -> Tensor:
    """ln probs[n, ids[n]] -> [N] fp32; -inf where the entry is 0 (no gradient there). For a law made of logits,
    ``law_logprob`` has the better gradient: 1 / p of a tiny p overflows."""
    if recording(probs):
        return _LogOf.apply(probs, ids)
    return backend(probs).log_of(probs, ids)


def law_logprob(
    logits: Tensor, ids: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """log_of(shape_probs(logits, ...), ids) -> [N] fp32, the same bits, with the gradient in one step: it never divides
    by a probability, and is zero for a token outside the support (whose logprob is -inf) and at temperature 0."""
    if recording(logits):
        return _LawLogprob.apply(logits, ids, temperature, top_k, top_p, min_p)
    return log_of(shape_probs(logits, temperature, top_k, top_p, min_p), ids)


class _LawLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> Tensor:
        probs = backend(logits).shape_probs(logits, temperature, top_k, top_p, min_p)
        ctx.save_for_backward(probs, ids, temperature)
        return backend(logits).log_of(probs, ids)

    @staticmethod
    @plain_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        probs, ids, temperature = ctx.saved_tensors
        at = ids[:, None]
        moves = (probs.gather(-1, at) > 0) & (temperature > 0)[:, None]
        rate = torch.where(moves, dy[:, None] / torch.where(moves, temperature[:, None], 1.0), 0.0)
        gradient = torch.zeros_like(probs).scatter_(-1, at, rate) - probs * rate
        return gradient, None, None, None, None, None


class _ShapeProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        probs = backend(logits).shape_probs(logits, temperature, top_k, top_p, min_p)
        ctx.save_for_backward(probs, temperature)
        return probs

    @staticmethod
    @plain_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        probs, temperature = ctx.saved_tensors
        heat = torch.where(temperature > 0, temperature, torch.inf)[:, None]  # a greedy law does not move
        return probs * (dy - (probs * dy).sum(-1, keepdim=True)) / heat, None, None, None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        out = backend(logits).log_softmax(logits)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @plain_backward
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return dy - out.exp() * dy.sum(-1, keepdim=True)


class _RawLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(logits, ids)
        return backend(logits).raw_logprob(logits, ids)

    @staticmethod
    @plain_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids = ctx.saved_tensors
        dy = dy.to(wide(logits.dtype))[:, None]
        gradient = logits.softmax(-1).mul_(-dy)
        return gradient.scatter_add_(-1, ids[:, None], dy), None


class _LogOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(probs, ids)
        return backend(probs).log_of(probs, ids)

    @staticmethod
    @plain_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        probs, ids = ctx.saved_tensors
        at, law = ids[:, None], probs.gather(-1, ids[:, None])
        return torch.zeros_like(probs).scatter_(-1, at, torch.where(law > 0, dy[:, None] / law, 0.0)), None
