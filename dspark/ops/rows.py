"""Row-wise operations of a decoder layer: norms, rotary embedding, gated activation. fp32 or bf16, fp32 inside."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.native import check, dtype_code, lib, require, threads


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x[N, H] or [N, heads, D], weight [H] or [D].

    Rounded once, at the end (Hugging Face rounds bf16 before the weight too). RMSNorm: arXiv:1910.07467.
    """
    code = dtype_code("rms_norm", x)
    check("rms_norm", x, weight)
    h = x.shape[-1]
    require(weight.shape == (h,) and weight.dtype == x.dtype, "rms_norm", f"a weight [{h}] of {x.dtype}", weight.shape)
    out = torch.empty_like(x)
    rows = x.numel() // h if h else 0
    lib().dspark_rms_norm(out.data_ptr(), None, x.data_ptr(), None, weight.data_ptr(), rows, h, eps, code, threads())
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), the sum rounded to the dtype first: equal bit for bit to doing it apart."""
    code = dtype_code("add_rms_norm", x)
    check("add_rms_norm", x, residual, weight)
    h = x.shape[-1]
    same = weight.shape == (h,) and residual.shape == x.shape and x.dtype == residual.dtype == weight.dtype
    require(same, "add_rms_norm", "x, residual of one shape and dtype", (x.shape, residual.shape, weight.shape))
    out, total = torch.empty_like(x), torch.empty_like(x)
    lib().dspark_rms_norm(
        out.data_ptr(), total.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr(), x.numel() // h, h, eps,
        code, threads(),
    )  # fmt: skip
    return out, total


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head: x[N, heads, D], cos and sin [N, D/2] fp32 (Llama / Qwen convention)."""
    code = dtype_code("rotary", x)
    check("rotary", x, cos, sin)
    n, heads, d = x.shape
    good = d % 2 == 0 and cos.shape == sin.shape == (n, d // 2) and cos.dtype == sin.dtype == torch.float32
    require(good, "rotary", f"cos and sin [{n}, {d // 2}] of float32", (cos.shape, sin.shape, cos.dtype))
    out = torch.empty_like(x)
    lib().dspark_rotary(
        out.data_ptr(), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), n, heads, d // 2, code, threads()
    )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of one fused row [gate | up]: gate_up[N, 2 I] -> [N, I]. SwiGLU: arXiv:2002.05202."""
    code = dtype_code("silu_mul", gate_up)
    check("silu_mul", gate_up)
    n, width = gate_up.shape
    require(width % 2 == 0, "silu_mul", "an even width [N, 2 I]", width)
    out = torch.empty((n, width // 2), dtype=gate_up.dtype)
    lib().dspark_silu_mul(out.data_ptr(), gate_up.data_ptr(), n, width // 2, code, threads())
    return out
