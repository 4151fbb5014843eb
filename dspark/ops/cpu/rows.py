"""Checks and calls of cpu/rows.c; what the functions mean stands in dspark/ops/rows.py."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.cpu.native import check, check_grad, dtype_code, lib, refuse, row_stride, threads


def _check_dims(op: str, x: Tensor, allowed: tuple[int, ...]) -> None:
    if x.dim() not in allowed or not x.shape[-1]:
        refuse(op, f"{' or '.join(map(str, allowed))} dimensions, the last one not empty", tuple(x.shape))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    code = dtype_code("rms_norm", x)
    _check_dims("rms_norm", x, (2, 3))
    stride = row_stride("rms_norm", x)
    check("rms_norm", weight)
    check_grad("rms_norm", x)
    h = x.shape[-1]
    if weight.shape != (h,) or weight.dtype != x.dtype:
        refuse("rms_norm", f"a weight [{h}] of {x.dtype}", f"{tuple(weight.shape)} of {weight.dtype}")
    out = torch.empty(x.shape, dtype=x.dtype)
    heads = 1 if x.dim() == 2 else x.shape[1]
    lib().dspark_rms_norm(
        out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.shape[0], heads, h, stride, eps, code, threads()
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    code = dtype_code("add_rms_norm", x)
    _check_dims("add_rms_norm", x, (2,))
    check("add_rms_norm", x, residual, weight)
    h = x.shape[-1]
    if weight.shape != (h,) or residual.shape != x.shape or not x.dtype == residual.dtype == weight.dtype:
        got = f"{tuple(x.shape)}, {tuple(residual.shape)} and {tuple(weight.shape)}"
        refuse("add_rms_norm", f"x and residual of one shape and a weight [{h}], all {x.dtype}", got)
    out, total = torch.empty_like(x), torch.empty_like(x)
    lib().dspark_add_rms_norm(
        out.data_ptr(), total.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr(), x.numel() // h, h, eps,
        code, threads(),
    )  # fmt: skip
    return out, total


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    code = dtype_code("rotary", x)
    _check_dims("rotary", x, (3,))
    stride = row_stride("rotary", x)
    check("rotary", cos, sin)
    check_grad("rotary", x)
    n, heads, d = x.shape
    if d % 2 or not cos.shape == sin.shape == (n, d // 2) or not cos.dtype == sin.dtype == torch.float32:
        refuse("rotary", f"cos and sin [{n}, {d / 2}] of float32", f"{tuple(cos.shape)} of {cos.dtype}")
    out = torch.empty((n, heads, d), dtype=x.dtype)
    lib().dspark_rotary(
        out.data_ptr(), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), n, heads, d // 2, stride, code, threads()
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    code = dtype_code("silu_mul", gate_up)
    _check_dims("silu_mul", gate_up, (2,))
    check("silu_mul", gate_up)
    n, width = gate_up.shape
    if width % 2:
        refuse("silu_mul", "an even width [N, 2 I]", width)
    out = torch.empty((n, width // 2), dtype=gate_up.dtype)
    lib().dspark_silu_mul(out.data_ptr(), gate_up.data_ptr(), n, width // 2, code, threads())
    return out
