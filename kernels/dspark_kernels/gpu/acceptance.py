# mypy: disable-error-code="no-untyped-def"
"""The acceptance rate of rejection sampling, 1 - TV, from logits, and its gradient; no probability is ever stored.

    p = softmax(target), q = softmax(draft);   rate = sum_v min(p_v, q_v) = 1 - TV(p, q)
    d rate / d draft_j = q_j (s_j - sum_v s_v q_v),   s_v = 1 where q_v < p_v, else 0
At a tie q_v = p_v, where min has no derivative, s_v = 0 (torch.minimum takes 1/2; for p = q both give zero).

One program a row, which reads the row twice: first the maximum and sum of exponentials of both softmaxes, then the sums
over min(p, q) and s q. Lane j of 2048 takes the columns j mod 2048 in ascending order; the lanes are added in one tree.
That tree is fixed by the block size, the warp count and the vector width of the loads, never by the number of rows. The
gradient is one more pass, element by element.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.gpu.aot import Case
from dspark_kernels.gpu.arguments import FLOATS, TRITON_TYPE, aligned, check, matrix

_BLOCK, _WARPS = 2048, 8
_STATS = 5  # a row's: target maximum, 1 / target sum, draft maximum, 1 / draft sum, sum of s q


@triton.jit
def _load(x, column, v):
    return tl.load(x + column, mask=column < v, other=float("-inf")).to(tl.float32)


@triton.jit
def _grow(top, total, x):
    """Lane by lane: the maximum with x, and the sum of exponentials relative to it. A lane of -inf alone sums to 0."""
    new = tl.maximum(top, x)
    base = tl.where(new == float("-inf"), 0.0, new)
    return new, total * tl.exp(top - base) + tl.exp(x - base)


@triton.jit
def _join(top, total):
    """The lanes' maximum, and 1 / the sum of exponentials relative to it."""
    best = tl.max(top, axis=0)
    return best, tl.math.div_rn(1.0, tl.sum(total * tl.exp(top - best), axis=0))


@triton.jit
def _laws(target, draft, column, v, p_top, p_scale, q_top, q_scale):
    p = tl.exp(_load(target, column, v) - p_top) * p_scale
    return p, tl.exp(_load(draft, column, v) - q_top) * q_scale


@triton.jit
def _rate(target, draft, rate, stats, v, BLOCK: tl.constexpr, STATS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target += row * v
    draft += row * v
    lane = tl.arange(0, BLOCK)
    p_top, q_top = tl.full((BLOCK,), float("-inf"), tl.float32), tl.full((BLOCK,), float("-inf"), tl.float32)
    p_sum, q_sum = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, v, BLOCK):
        p_top, p_sum = _grow(p_top, p_sum, _load(target, start + lane, v))
        q_top, q_sum = _grow(q_top, q_sum, _load(draft, start + lane, v))
    p_best, p_scale = _join(p_top, p_sum)
    q_best, q_scale = _join(q_top, q_sum)

    least, below = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, v, BLOCK):
        p, q = _laws(target, draft, start + lane, v, p_best, p_scale, q_best, q_scale)
        least += tl.minimum(p, q, propagate_nan=tl.PropagateNan.ALL)  # a broken row must not look like a good one
        below += tl.where(q < p, q, 0.0)
    tl.store(rate + row, tl.sum(least, axis=0))
    stats += row * STATS
    tl.store(stats, p_best)
    tl.store(stats + 1, p_scale)
    tl.store(stats + 2, q_best)
    tl.store(stats + 3, q_scale)
    tl.store(stats + 4, tl.sum(below, axis=0))


@triton.jit
def _gradient(target, draft, stats, outer, gradient, v, BLOCK: tl.constexpr, STATS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stats += row * STATS
    p_best, p_scale, q_best, q_scale = tl.load(stats), tl.load(stats + 1), tl.load(stats + 2), tl.load(stats + 3)
    p, q = _laws(target + row * v, draft + row * v, column, v, p_best, p_scale, q_best, q_scale)
    slope = q * (tl.where(q < p, 1.0, 0.0) - tl.load(stats + 4)) * tl.load(outer + row)
    tl.store(gradient + row * v + column, slope.to(gradient.dtype.element_ty), mask=column < v)


class _Acceptance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: Tensor, draft: Tensor) -> Tensor:
        n, v = draft.shape
        target, draft = aligned(target), aligned(draft)
        rate = torch.empty(n, dtype=torch.float32, device=draft.device)
        stats = torch.empty((n, _STATS), dtype=torch.float32, device=draft.device)
        if n:
            _rate[(n,)](target, draft, rate, stats, v, BLOCK=_BLOCK, STATS=_STATS, num_warps=_WARPS)
        ctx.save_for_backward(target, draft, stats)
        return rate

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[None, Tensor]:
        if torch.is_grad_enabled():  # exactly under create_graph=True; once_differentiable misses a constant ``outer``
            raise ValueError("acceptance: expected a first derivative, but got create_graph=True. Leave it out.")
        target, draft, stats = ctx.saved_tensors
        n, v = draft.shape
        gradient = torch.empty_like(draft)
        if n:
            grid = (n, triton.cdiv(v, _BLOCK))
            _gradient[grid](
                target, draft, stats, outer.contiguous(), gradient, v, BLOCK=_BLOCK, STATS=_STATS, num_warps=_WARPS
            )
        return None, gradient


def acceptance(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """sum_v min(p_v, q_v) of the two softmaxes -> [N] fp32. target_logits, draft_logits [N, V], each fp32 or bf16.

    Differentiable once in the draft's logits (gradient in their dtype, rounded once). The target is a constant. A row
    with NaN, +inf or no finite logit gives NaN. Raises ValueError on other shapes, dtypes or devices, and when the
    target wants a gradient.
    """
    n, v = matrix("acceptance", "draft_logits", draft_logits)
    check("acceptance", target_logits=(target_logits, (n, v), FLOATS), draft_logits=(draft_logits, (n, v), FLOATS))
    if not v:
        raise ValueError(f"acceptance: expected a vocabulary, but got logits {[n, v]}. Pass at least one column.")
    if torch.is_grad_enabled() and target_logits.requires_grad:
        raise ValueError(
            "acceptance: expected target_logits without requires_grad (the target is a constant here), but got one "
            "that records gradients. Detach it."
        )
    return _Acceptance.apply(target_logits, draft_logits)


def acceptance_reference(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """In fp64, rounded once; torch's autograd of it has the same slope at ties (0: the minimum is taken from p)."""
    p, q = target_logits.double().softmax(-1), draft_logits.double().softmax(-1)
    return torch.where(q < p, q, p).sum(-1).float()


def _cases(target: str, draft: str) -> list[Case]:
    logits = {"target": f"*{target}", "draft": f"*{draft}"}
    forward = {**logits, "rate": "*fp32", "stats": "*fp32", "v": "i32:16"}
    backward = {**logits, "stats": "*fp32", "outer": "*fp32", "gradient": f"*{draft}", "v": "i32:16"}
    constants = {"BLOCK": _BLOCK, "STATS": _STATS}
    return [
        Case(f"acceptance.rate.{target}.{draft}", _rate, forward, constants, num_warps=_WARPS),
        Case(f"acceptance.gradient.{target}.{draft}", _gradient, backward, constants, num_warps=_WARPS),
    ]


AOT = [case for a in FLOATS for b in FLOATS for case in _cases(TRITON_TYPE[a], TRITON_TYPE[b])]
