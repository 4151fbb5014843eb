"""Row-wise operations of a decoder layer and their gradients: norms, rotary embedding, gated activation.

rms_norm and rotary also take a slice of a wider row (the q or k part of a fused projection): only the last dimensions
must be packed. The result is contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.ops.backend import backend, recording
from dspark.ops.linear import plain_backward, wide


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x[N, H] or [N, heads, D], weight [H] or [D].

    Rounded once, at the end (Hugging Face rounds bf16 before the weight too). RMSNorm: arXiv:1910.07467.
    """
    if recording(x, weight):
        return _RMSNorm.apply(x, weight, eps)
    return backend(x).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) for x[N, H]; the sum is rounded to the dtype first, so the result equals
    doing it in two steps bit for bit."""
    if recording(x, residual, weight):
        return _AddRMSNorm.apply(x, residual, weight, eps)
    return backend(x).add_rms_norm(x, residual, weight, eps)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head: x[N, heads, D], cos and sin [N, D/2] fp32 (Llama / Qwen convention).

    RoPE: arXiv:2104.09864, with dimension j paired with j + D/2. No gradient to the tables.
    """
    if recording(x):
        return _Rotary.apply(x, cos, sin)
    return backend(x).rotary(x, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of one fused row [gate | up]: gate_up[N, 2 I] -> [N, I]. SwiGLU: arXiv:2002.05202."""
    if recording(gate_up):
        return _SiluMul.apply(gate_up)
    return backend(gate_up).silu_mul(gate_up)


def _norm_gradients(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """With n = x / rms and g = dy * weight: dx = (g - n mean(g n)) / rms and dweight = sum of dy n over rows."""
    dtype = wide(x.dtype)
    x, dy = x.to(dtype), dy.to(dtype)
    inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = x * inverse
    inner = dy * weight.to(dtype)
    dx = (inner - normed * (inner * normed).mean(-1, keepdim=True)) * inverse
    return dx, (dy * normed).flatten(0, -2).sum(0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return backend(x).rms_norm(x, weight, eps)

    @staticmethod
    @plain_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dweight = _norm_gradients(dy, x, weight, ctx.eps)
        return dx.to(x.dtype), dweight.to(weight.dtype), None


class _AddRMSNorm(torch.autograd.Function):
    """The rounding of the sum to bf16 passes gradients through unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = backend(x).add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return normed, total

    @staticmethod
    @plain_backward
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        dx, dweight = _norm_gradients(dy, total, weight, ctx.eps)
        dx = (dx + dtotal.to(dx.dtype)).to(total.dtype)
        return dx, dx, dweight.to(weight.dtype), None


class _Rotary(torch.autograd.Function):
    """A rotation's gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return backend(x).rotary(x, cos, sin)

    @staticmethod
    @plain_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return backend(dy).rotary(dy.contiguous(), cos, -sin), None, None


class _SiluMul(torch.autograd.Function):
    """With s = sigmoid(gate): d gate = dy up s (1 + gate (1 - s)), d up = dy gate s."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return backend(gate_up).silu_mul(gate_up)

    @staticmethod
    @plain_backward
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        dtype = wide(gate_up.dtype)
        (gate, up), dy = gate_up.to(dtype).chunk(2, -1), dy.to(dtype)
        s = gate.sigmoid()
        return torch.cat((dy * up * s * (1 + gate * (1 - s)), dy * gate * s), -1).to(gate_up.dtype)
