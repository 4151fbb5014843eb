"""Invariant attention over ranges of key rows, and its gradient: one code path for prefill, decode, verification, draft
blocks and the trainer's whole sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.ops.backend import backend, recording
from dspark.ops.linear import plain_backward, wide

QUERIES = 64  # per step of the gradient: bounds its memory


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begin: Tensor,
    end: Tensor,
    scale: float,
    k2: Tensor | None = None,
    v2: Tensor | None = None,
    begin2: Tensor | None = None,
    end2: Tensor | None = None,
) -> Tensor:
    """q[N, Hq, D] over k, v [T, Hkv, D] -> [N, Hq, D]; query n sees rows begin[n]:end[n], then begin2:end2 of k2, v2.

    One fp32 softmax over both ranges; a query without any key gives zeros. Query head h reads key head
    h // (Hq / Hkv). Rows outside a query's ranges never enter its value, NaN or not. A sliding window is a later begin.
    Raises DsparkError on ranges outside the arena, other dtypes, shapes or layouts.
    """
    if recording(q, k, v, k2, v2):
        return _Attention.apply(q, k, v, begin, end, scale, k2, v2, begin2, end2)
    return backend(q).attention(q, k, v, begin, end, scale, k2, v2, begin2, end2)


class _Attention(torch.autograd.Function):
    """The gradient computes the scores again, QUERIES queries at a time; nothing of size N x T is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        begin: Tensor,
        end: Tensor,
        scale: float,
        k2: Tensor | None,
        v2: Tensor | None,
        begin2: Tensor | None,
        end2: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, begin, end, k2, v2, begin2, end2)
        ctx.scale = scale
        return backend(q).attention(q, k, v, begin, end, scale, k2, v2, begin2, end2)

    @staticmethod
    @plain_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, begin, end, k2, v2, begin2, end2 = ctx.saved_tensors
        dtype = wide(q.dtype)
        parts = [(k, v, begin, end)] if k2 is None else [(k, v, begin, end), (k2, v2, begin2, end2)]
        dq = q.new_zeros(q.shape, dtype=dtype)
        gradients = [(k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)) for k, v, _, _ in parts]
        for start in range(0, len(q), QUERIES):
            rows = slice(start, start + QUERIES)
            seen = [_keys_of(k, v, begin[rows], end[rows], dtype) for k, v, begin, end in parts]
            keys, values = torch.cat([part[0] for part in seen]), torch.cat([part[1] for part in seen])
            mask = torch.cat([part[2] for part in seen], dim=1)
            dq[rows], dkeys, dvalues = _gradients(q[rows].to(dtype), keys, values, mask, dy[rows].to(dtype), ctx.scale)
            at = 0
            for (dk, dv), (part, _, _, low) in zip(gradients, seen, strict=True):
                dk[low : low + len(part)] += dkeys[at : at + len(part)]
                dv[low : low + len(part)] += dvalues[at : at + len(part)]
                at += len(part)
        pairs = [(dk.to(q.dtype), dv.to(q.dtype)) for dk, dv in gradients]
        second = pairs[1] if k2 is not None else (None, None)
        return dq.to(q.dtype), *pairs[0], None, None, None, *second, None, None


def _keys_of(
    k: Tensor, v: Tensor, begin: Tensor, end: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The key and value rows [T, Hkv, D] that any of the queries sees (those in between that none sees are zeroed: they
    may be garbage), who sees which [N, T], and the first row's number."""
    some = end > begin
    if not some.any():
        return k[:0].to(dtype), v[:0].to(dtype), some[:, None][:, :0], 0
    low, high = int(begin[some].min()), int(end[some].max())
    rows = torch.arange(low, high, device=begin.device)
    mask = (rows >= begin[:, None]) & (rows < end[:, None])
    unseen = ~mask.any(0)[:, None, None]
    keys, values = (t[low:high].to(dtype).masked_fill(unseen, 0.0) for t in (k, v))
    return keys, values, mask, low


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dy: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of softmax(scale q k^T) v with P the weights: dv = P^T dy, dS = P (dy v^T - sum of P dy v^T)."""
    n, heads, d = q.shape
    q, dy = (t.view(n, k.shape[1], -1, d) for t in (q, dy))
    scores = torch.einsum("nhgd,thd->nhgt", q, k) * scale
    weights = scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    dv = torch.einsum("nhgt,nhgd->thd", weights, dy)
    inner = torch.einsum("nhgd,thd->nhgt", dy, v)
    dscores = weights * (inner - (weights * inner).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("nhgt,thd->nhgd", dscores, k).reshape(n, heads, d)
    return dq, torch.einsum("nhgt,nhgd->thd", dscores, q), dv
