# mypy: disable-error-code="no-untyped-def"
"""RMSNorm over the last dimension, and the residual addition before it. RMSNorm: arXiv:1910.07467.

    norm = x * (1 / sqrt(mean(x^2) + eps)) * weight     in fp32, products from left to right, rounded once
    sum  = x + residual, rounded to the dtype; the norm is taken of the rounded sum
Order of summation: one row is one block (its length padded to a power of two with zeros); a thread adds its own
squares, then threads meet in a fixed tree. The tree depends on the length, the dtype and how wide a thread's loads are.
So that loads are as wide for every batch, nothing that varies with it (row count, stride, address) may reach the
compiler: the stride is passed in steps of what divides the row's length, and an input that breaks this is copied first.

Several short rows (heads) share a program; each is summed by its own threads in the same tree. Multiply-add contraction
is off and the root and the division are IEEE, so the two ops agree in every bit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.gpu.aot import Case
from dspark_kernels.gpu.arguments import FLOATS, aligned, check, interpreting

MAX_WIDTH = 32768


@triton.jit(do_not_specialize=["rows", "steps"])
def _rms_norm(
    out, total, x, residual, weight, rows, steps, eps,
    HEADS: tl.constexpr, D: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < D)[None, :]
    place = (row // HEADS).to(tl.int64) * (steps * VECTOR) + (row % HEADS) * D
    packed = (row.to(tl.int64) * D)[:, None] + column[None, :]
    value = tl.load(x + place[:, None] + column[None, :], mask=mask, other=0.0)
    if residual is not None:
        added = value.to(tl.float32) + tl.load(residual + packed, mask=mask, other=0.0).to(tl.float32)
        value = added.to(total.dtype.element_ty)
        tl.store(total + packed, value, mask=mask)
    wide = value.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) * (1.0 / D)
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    scale = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    norm = wide * inverse[:, None] * scale[None, :]
    tl.store(out + packed, norm.to(out.dtype.element_ty), mask=mask)


def rows_of(op: str, x: Tensor, vector: int = 1) -> tuple[Tensor, int]:
    """x[N, H] or x[N, heads, D] and the elements from one row to the next, or a packed copy of it when its address is
    no multiple of 16 bytes or its stride none of ``vector``. Raises ValueError unless x is fp32 or bf16, packed within
    a row, and on a CUDA device (on the CPU when interpreting)."""
    packed = x.dim() in (2, 3) and x.stride(-1) == 1 and (x.dim() == 2 or x.shape[1] == 1 or x.stride(1) == x.shape[2])
    if not packed or x.dtype not in FLOATS or x.is_cpu != interpreting():
        raise ValueError(
            f"{op}: expected x [N, H] or [N, heads, D] of float32 or bfloat16, packed within a row, on a CUDA device "
            f"(on the CPU with TRITON_INTERPRET), but got {list(x.shape)} with strides {x.stride()} of {x.dtype} on "
            f"{x.device}. Move it, or call .contiguous()."
        )
    width = math.prod(x.shape[1:])
    stride = x.stride(0) if x.shape[0] > 1 else width
    if stride % vector or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format), width
    return x, stride


def _shape(d: int) -> dict[str, int]:
    """How rows of length d are cut: a function of d alone."""
    block = triton.next_power_of_2(max(1, d))
    warps = min(16, max(4, block // 512))
    return {"D": d, "VECTOR": math.gcd(d, 16), "ROWS": max(1, 2048 // block), "BLOCK": block, "num_warps": warps}


def _launch(op: str, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    d, shape = x.shape[-1], _shape(x.shape[-1])
    x, stride = rows_of(op, x, shape["VECTOR"])
    check(op, weight=(weight, (d,), (x.dtype,)))
    if not 1 <= d <= MAX_WIDTH:
        raise ValueError(f"{op}: expected rows of 1 to {MAX_WIDTH} elements, but got {d}. Mend the shape.")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    rows = x.numel() // d
    if rows:
        _rms_norm[(triton.cdiv(rows, shape["ROWS"]),)](
            out, total, x, residual, aligned(weight), rows, stride // shape["VECTOR"], eps,
            HEADS=x.shape[1] if x.dim() == 3 else 1, **shape, enable_fp_fusion=False,
        )  # fmt: skip
    return out, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight; x[N, H] or [N, heads, D], maybe a slice of a wider row, weight [H] or [D].

    fp32 or bf16. The result is contiguous. Raises ValueError on other dtypes, shapes or layouts.
    """
    return _launch("rms_norm", x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) for x[N, H], residual [N, H]; equal in bits to adding first. Raises
    ValueError on other dtypes, shapes or layouts."""
    if x.dim() != 2:
        raise ValueError(f"add_rms_norm: expected x [N, H], but got {list(x.shape)}. Mend the argument's shape.")
    kind = (x.dtype,)
    check("add_rms_norm", x=(x, tuple(x.shape), FLOATS), residual=(residual, tuple(x.shape), kind))
    norm, total = _launch("add_rms_norm", x, aligned(residual), weight, eps)
    assert total is not None, "a residual gives a sum"
    return norm, total


def _case(kind: str, d: int, heads: int = 1, add: bool = False) -> Case:
    shape = _shape(d)
    warps = shape.pop("num_warps")
    pointers = dict.fromkeys(("out", "x", "weight") + ("total", "residual") * add, f"*{kind}")
    absent = {} if add else {"total": None, "residual": None}
    signature = {**pointers, "rows": "i32", "steps": "i32", "eps": "fp32"}
    name = f"norm.{'add_' * add}rms_norm.{kind}.{d}"
    return Case(name, _rms_norm, signature, {**absent, **shape, "HEADS": heads}, warps, fp_fusion=False)


AOT = [
    _case("bf16", 128, heads=8),
    _case("bf16", 576),
    _case("bf16", 576, add=True),
    _case("bf16", 8192, add=True),
    _case("fp32", 576, add=True),
    _case("fp32", MAX_WIDTH, add=True),
]
