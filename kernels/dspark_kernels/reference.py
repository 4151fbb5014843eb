"""Plain torch references of the CPU kernels: same names and arguments, no thought for speed or for the last bit.

Arithmetic is fp64 on the given values, rounded to the output dtype at the end, so a kernel's error is measured
against the truth. ``linear_chain`` is the exception: it repeats the kernel's own chain of fp32 FMAs, bit for bit.
Noise comes in as a tensor (its reference, dspark/noise.py, is not importable from here).
"""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x[N, I] @ weight[O, I].T (+ bias)."""
    y = x.double() @ weight.double().T
    return (y if bias is None else y + bias.double()).to(out_dtype or x.dtype)


LINEAR_BLOCK = 64  # KB of cpu/linear.c


def linear_chain(x: Tensor, weight: Tensor) -> Tensor:
    """The kernel's bits for x[N, I], weight[O, I], fp32: chains acc = fma(x_k, w_k, acc) over blocks of 64 k, in order,
    and the chains' results added in order.

    The product of two fp32 values is exact in fp64, but adding acc to it rounds once in fp64 and once to fp32. To be
    a true FMA the fp64 sum is rounded to odd first (Boldo and Melquiond, 2008).
    """
    total = torch.zeros(x.shape[0], weight.shape[0])
    for start in range(0, x.shape[1], LINEAR_BLOCK):
        acc = torch.zeros(total.shape, dtype=torch.float64)
        for k in range(start, min(start + LINEAR_BLOCK, x.shape[1])):
            product = x[:, k, None].double() * weight[None, :, k].double()
            acc = _add_to_odd(product, acc).float().double()
        total = total + acc.float() if start else acc.float()
    return total


def _add_to_odd(a: Tensor, b: Tensor) -> Tensor:
    """a + b in fp64, rounded to odd: when inexact, the neighbour with an odd last bit."""
    total = a + b
    shadow = total - a
    error = (a - (total - shadow)) + (b - shadow)  # two-sum: exact
    bits = total.view(torch.int64)
    even = (bits & 1) == 0
    away = (error > 0) == (total > 0)
    odd = torch.where(away, bits + 1, bits - 1).view(torch.float64)
    return torch.where((error != 0) & even, odd, total)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Norm of the rounded sum, and the sum."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation of x[N, heads, D] by cos, sin [N, D/2]."""
    a, b = x.double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half times the second."""
    gate, up = gate_up.double().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


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
    """One query at a time, its key rows gathered; see dspark.ops.attention for the shapes."""
    out = torch.zeros_like(q)
    for n in range(q.shape[0]):
        keys, values = k[begin[n] : end[n]], v[begin[n] : end[n]]
        if k2 is not None and v2 is not None and begin2 is not None and end2 is not None:
            keys = torch.cat((keys, k2[begin2[n] : end2[n]]))
            values = torch.cat((values, v2[begin2[n] : end2[n]]))
        if keys.shape[0]:
            out[n] = _attend(q[n], keys, values, scale)
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    group = q.shape[0] // keys.shape[1]
    keys, values = (t.double().repeat_interleave(group, 1) for t in (keys, values))
    weights = (torch.einsum("hd,thd->ht", q.double(), keys) * scale).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, values).to(q.dtype)


def shape_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Row by row, in words: sort, keep k, keep the nucleus, keep what is not too small, renormalise."""
    out = torch.zeros_like(logits)
    for n in range(logits.shape[0]):
        ranked, order = logits[n].double().sort(dim=-1, descending=True, stable=True)
        if temperature[n] == 0:
            out[n, order[0]] = 1.0
            continue
        weights = ((ranked - ranked[0]) / temperature[n].double()).exp()
        kept = int(top_k[n]) if 0 < top_k[n] < len(weights) else len(weights)
        weights = weights[:kept]
        if top_p[n] < 1:
            before = weights.cumsum(0) - weights
            weights = weights[: max(1, int((before < top_p[n].double() * weights.sum()).sum()))]
        weights = weights[weights >= min_p[n].double()]
        out[n, order[: len(weights)]] = (weights / weights.sum()).to(out.dtype)
    return out


def gumbel_argmax(probs: Tensor, noise: Tensor) -> Tensor:
    """argmax of ln p + noise over the support; noise[N, V]. The first of equals."""
    return (probs.double().log() + noise.double()).argmax(-1)


def logsumexp(logits: Tensor) -> Tensor:
    """ln sum exp of each row."""
    return logits.double().logsumexp(-1).to(logits.dtype)


def log_softmax(logits: Tensor) -> Tensor:
    """ln softmax of each row."""
    return logits.double().log_softmax(-1).to(logits.dtype)


def raw_logprob(logits: Tensor, ids: Tensor) -> Tensor:
    """log_softmax gathered."""
    return logits.double().log_softmax(-1).gather(-1, ids[:, None])[:, 0].to(logits.dtype)


def log_of(probs: Tensor, ids: Tensor) -> Tensor:
    """ln of the gathered entries."""
    return probs.double().gather(-1, ids[:, None])[:, 0].log().to(probs.dtype)
