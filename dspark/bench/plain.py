"""The target's operations as plain torch has them: what invariance is measured against, in bits and in time.

The fast way where torch has one: F.linear, F.rms_norm, scaled_dot_product_attention over whole batches. A row's bits
depend on the batch here. Names and arguments are those of dspark.ops; no second range of keys.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    return F.linear(x, weight, bias).to(out_dtype or x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight, eps), total


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (t[:, None].to(x.dtype) for t in (cos, sin))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def log_softmax(logits: Tensor) -> Tensor:
    return F.log_softmax(logits, -1)


def attention(q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, scale: float) -> Tensor:
    """One call for a decode batch of equally long contexts that lie evenly in the arena (without a copy), or for one
    prompt; else one call per sequence."""
    begins, ends = begin.tolist(), end.tolist()
    if _even(begins, ends):
        step = begins[1] - begins[0] if len(begins) > 1 else 1
        keys, values = (_contexts(t, begins[0], step, len(begins), ends[0] - begins[0]) for t in (k, v))
        if q.dtype == torch.float32:
            return _sdpa(q[:, :, None], keys, values, scale, causal=False)[:, :, 0]
        grouped = q.view(len(q), k.shape[1], -1, q.shape[2])  # 5 times faster in bf16: a group's heads as its queries
        return _sdpa(grouped, keys, values, scale, causal=False).reshape(q.shape)
    cuts = [i for i in range(len(begins)) if i == 0 or begins[i] != begins[i - 1]] + [len(begins)]
    parts = []
    for i, j in pairwise(cuts):
        rows = slice(begins[i], ends[j - 1])
        parts.append(_sequence(q[i:j], k[rows], v[rows], scale))
    return torch.cat(parts)


def _even(begins: list[int], ends: list[int]) -> bool:
    """One query each, contexts of one length, and one distance from each to the next."""
    lengths = {b - a for a, b in zip(begins, ends, strict=True)}
    steps = {b - a for a, b in pairwise(begins)}
    return len(lengths) == 1 and len(steps) <= 1 and 0 not in steps


def _contexts(t: Tensor, first: int, step: int, count: int, length: int) -> Tensor:
    """A view [R, Hkv, T, D] of arena t [rows, Hkv, D]."""
    heads, d = t.shape[1:]
    return t.as_strided(
        (count, heads, length, d), (step * heads * d, d, heads * d, 1), t.storage_offset() + first * heads * d
    )


def _sequence(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The last len(q) queries of one sequence over its keys [T, Hkv, D]."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    n, t = q.shape[2], k.shape[2]
    mask = None if n in (1, t) else torch.ones(n, t, dtype=torch.bool).tril(t - n)
    return _sdpa(q, k, v, scale, causal=n == t, mask=mask)[0].transpose(0, 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)
