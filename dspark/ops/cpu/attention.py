"""Checks and call of cpu/attention.c; what attention means stands in dspark/ops/attention.py."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.cpu.native import check, dtype_code, lib, raise_status, refuse, threads

MAX_HEAD_SIZE = 1024
MAX_GROUP = 256


def _check_keys(q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor) -> None:
    check("attention", q, k, v, begin, end)
    if q.dim() != 3:
        refuse("attention", "q [N, Hq, D]", tuple(q.shape))
    d = q.shape[2]
    if k.dim() != 3 or k.shape != v.shape or k.shape[2] != d or not k.dtype == v.dtype == q.dtype:
        got = f"{tuple(k.shape)} and {tuple(v.shape)} of {k.dtype}"
        refuse("attention", f"k and v [T, Hkv, {d}] of {q.dtype}", got)
    if begin.shape != q.shape[:1] or end.shape != begin.shape or not begin.dtype == end.dtype == torch.int64:
        got = f"{tuple(begin.shape)} and {tuple(end.shape)} of {begin.dtype}"
        refuse("attention", f"begin and end [{q.shape[0]}] of int64", got)


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
    code = dtype_code("attention", q)
    _check_keys(q, k, v, begin, end)
    n, hq, d = q.shape
    hkv = k.shape[1]
    if not hkv or hq % hkv or d > MAX_HEAD_SIZE or hq // hkv > MAX_GROUP:
        refuse("attention", "Hq divisible by Hkv, D <= 1024, Hq / Hkv <= 256", f"Hq {hq}, Hkv {hkv}, D {d}")
    second: tuple[int | None, ...] = (None, None, None, None)
    t2 = 0
    if k2 is not None:
        if v2 is None or begin2 is None or end2 is None:
            refuse("attention", "v2, begin2 and end2 with k2", "some of them alone")
        _check_keys(q, k2, v2, begin2, end2)
        t2 = k2.shape[0]
        if k2.shape[1] != hkv:
            refuse("attention", f"{hkv} heads in k2", k2.shape[1])
        second = (k2.data_ptr(), v2.data_ptr(), begin2.data_ptr(), end2.data_ptr())
    out = torch.empty_like(q)
    status = lib().dspark_attention(
        out.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), begin.data_ptr(), end.data_ptr(), *second,
        n, k.shape[0], t2, hq, hkv, d, scale, code, threads(),
    )  # fmt: skip
    if status:
        raise_status("attention", status)
    return out
