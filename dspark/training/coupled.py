"""Acceptance by the coupled verifier and its exact slope, from one sort of p / q per row (arXiv:2408.07978).

    c = sum_v t_v,  t_v = p_v q_v / (P_v q_v + Q_v p_v),   P_v = sum of p where p/q >= p_v/q_v,  Q_v = sum of q below it
    dc/dq_v = Q_v a_v^2 - sum of t_u a_u over u with a larger p/q,   a_v = p_v / (P_v q_v + Q_v p_v)

``probability.coupled_acceptance`` is the definition. Here the mass of p outside the draft vocabulary is one number (its
ratio is infinite: it only adds to every P), nothing of a row but its slope outlives the call, and no quotient can
overflow: t and a have one denominator, which is not smaller than p_v q_v. On a tie of ratios c has a kink; the slope is
then one of its one-sided slopes (the lower column counts as the larger ratio). At q_v = 0 it is the slope to the right.

Shapes: draft, inside [..., V'], outside [...]; fp32 or fp64. The sort is the price: on the CPU a column's number and
its ratio share one 64-bit key, which numpy sorts several times as fast as torch sorts values with indices. Left
out: sorting only columns whose mass an fp32 sum can feel. At temperature 1, 99.98 % of SmolLM2's columns are above
2^-25 / V' (200 rows, V' = 8192); at 0.2 one in ten is, but then a law of the draft must be as narrow too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def coupled_acceptance(draft: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Probability [...] that both laws draw the same token from shared noise; differentiable once, in draft alone."""
    return _Coupled.apply(draft, inside, outside)


def value_and_slope(draft: Tensor, inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """c [...] and dc/dq [..., V'], the columns of q taken as free (not yet as a law's)."""
    order = _order(inside, draft)
    p, q = inside.gather(-1, order), draft.gather(-1, order)
    above = p.cumsum(-1).add_(outside[..., None])
    below = _after(q)
    a = p.div_(above.mul_(q).addcmul_(below, p)).nan_to_num_(0.0)  # 0 / 0: neither law has the column
    t = q.mul_(a)
    value = t.sum(-1)
    passed = t.mul_(a)
    own = below.mul_(a).mul_(a)
    slope = own.sub_(passed.cumsum(-1)).add_(passed)
    return value, torch.empty_like(slope).scatter_(-1, order, slope)


class _Coupled(torch.autograd.Function):
    """Keeps the slope, one tensor of the laws' size, from forward to backward."""

    @staticmethod
    def forward(ctx: Any, draft: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
        value, slope = value_and_slope(draft, inside, outside)
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return outer[..., None] * slope, None, None


def _after(q: Tensor) -> Tensor:
    """Sum of all later columns; not a difference of sums, which would lose the small ones."""
    later = torch.zeros_like(q)
    later[..., :-1] = q[..., 1:].flip(-1).cumsum(-1).flip(-1)
    return later


def _order(p: Tensor, q: Tensor) -> Tensor:
    """Columns by descending p / q, those with p = 0 last, ties by column: int64 [..., V']."""
    inverse = torch.where(p > 0, q / p, torch.inf)
    if inverse.dtype != torch.float32 or inverse.device.type != "cpu":
        return inverse.argsort(dim=-1, stable=True)
    keys = inverse.view(torch.int32).long()  # the bits of floats >= 0 stand in the floats' order
    keys.bitwise_left_shift_(32).bitwise_or_(torch.arange(keys.shape[-1]))
    keys.numpy().sort(axis=-1)
    return keys.bitwise_and_(0xFFFFFFFF)
