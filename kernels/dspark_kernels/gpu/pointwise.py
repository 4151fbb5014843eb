# mypy: disable-error-code="no-untyped-def"
"""Rotary embedding and the gated activation of a decoder layer. fp32 or bf16, fp32 inside, rounded once at the end.

    rotary     (a, b) -> (a cos - b sin, b cos + a sin), dimension j paired with j + D/2 (Llama, Qwen): arXiv:2104.09864
    silu_mul   gate / (1 + exp(-gate)) * up: arXiv:2002.05202
Nothing is summed over elements, so nothing can depend on the batch. Multiply-add contraction is off: each product is
rounded, as in eager torch, and no compiled variant of a kernel can round another way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.gpu.aot import Case
from dspark_kernels.gpu.arguments import FLOATS, FP32, aligned, check
from dspark_kernels.gpu.norm import rows_of

_HEADS = 8  # heads of one program
_BLOCK = 2048


@triton.jit
def _rotary(
    out, x, cos, sin, stride, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head, j = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK)
    mask = (head < HEADS)[:, None] & (j < HALF)[None, :]
    place = head[:, None] * (2 * HALF) + j[None, :]
    a = tl.load(x + row * stride + place, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + row * stride + place + HALF, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + row * HALF + j, mask=j < HALF, other=0.0)[None, :]
    s = tl.load(sin + row * HALF + j, mask=j < HALF, other=0.0)[None, :]
    to = out + row * (HEADS * 2 * HALF) + place
    tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=mask)
    tl.store(to + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _silu_mul(out, gate_up, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=mask)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head: x[N, heads, D], maybe a slice of a wider row; cos, sin [N, D/2] fp32.

    The result is contiguous. Raises ValueError on other dtypes, shapes or layouts.
    """
    x, stride = rows_of("rotary", x)
    if x.dim() != 3 or x.shape[2] % 2:
        raise ValueError(f"rotary: expected x [N, heads, D] with an even D, but got {list(x.shape)}. Mend the shape.")
    n, heads, d = x.shape
    check("rotary", cos=(cos, (n, d // 2), FP32), sin=(sin, (n, d // 2), FP32))
    out = torch.empty((n, heads, d), dtype=x.dtype, device=x.device)
    if out.numel():
        _rotary[(n, triton.cdiv(heads, _HEADS))](
            out, x, aligned(cos), aligned(sin), stride,
            HEADS=heads, HALF=d // 2, BLOCK_HEADS=_HEADS, BLOCK=triton.next_power_of_2(d // 2), enable_fp_fusion=False,
        )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of one fused row [gate | up]: gate_up[N, 2 I] -> [N, I]. Raises ValueError on other dtypes,
    shapes or layouts."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul: expected gate_up [N, 2 I], but got {list(gate_up.shape)}. Mend the shape.")
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    check("silu_mul", gate_up=(gate_up, (n, 2 * width), FLOATS))
    out = torch.empty((n, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (n, triton.cdiv(width, _BLOCK))
        _silu_mul[grid](out, aligned(gate_up), width, BLOCK=_BLOCK, enable_fp_fusion=False)
    return out


def _cases(kind: str) -> list[Case]:
    rotary_types = {"out": f"*{kind}", "x": f"*{kind}", "cos": "*fp32", "sin": "*fp32", "stride": "i32:16"}
    rotary_shape = {"HEADS": 32, "HALF": 64, "BLOCK_HEADS": _HEADS, "BLOCK": 64}
    silu_types = {"out": f"*{kind}", "gate_up": f"*{kind}", "width": "i32:16"}
    return [
        Case(f"pointwise.rotary.{kind}", _rotary, rotary_types, rotary_shape, fp_fusion=False),
        Case(f"pointwise.silu_mul.{kind}", _silu_mul, silu_types, {"BLOCK": _BLOCK}, fp_fusion=False),
    ]


AOT = [*_cases("bf16"), *_cases("fp32")]
