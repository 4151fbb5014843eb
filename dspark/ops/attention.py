"""Invariant attention over ranges of key rows: one code path for prefill, decode, verification and draft blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.native import check, dtype_code, lib, out_of_memory, require, threads

MAX_HEAD_SIZE = 1024
MAX_GROUP = 256


def _check_keys(q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor) -> None:
    check("attention", q, k, v, begin, end)
    n, hq, d = q.shape
    good = k.shape == v.shape and k.dim() == 3 and k.shape[2] == d and k.dtype == v.dtype == q.dtype
    require(good, "attention", f"k and v [T, Hkv, {d}] of {q.dtype}", (tuple(k.shape), tuple(v.shape), k.dtype))
    require(hq % k.shape[1] == 0, "attention", "query heads divisible by key heads", (hq, k.shape[1]))
    ranges = begin.shape == end.shape == (n,) and begin.dtype == end.dtype == torch.int64
    require(ranges, "attention", f"begin and end [{n}] of int64", (begin.shape, end.shape, begin.dtype))
    if n:
        low, high = int(begin.min()), int(end.max())
        require(low >= 0 and high <= k.shape[0], "attention", f"ranges within 0:{k.shape[0]}", f"{low}:{high}")


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
    h // (Hq / Hkv). Rows outside a query's ranges are never read into its value, NaN or not. Raises DsparkError on
    ranges outside the arena, other dtypes, shapes or layouts, and when gradients would be needed.
    """
    code = dtype_code("attention", q)
    _check_keys(q, k, v, begin, end)
    n, hq, d = q.shape
    require(d <= MAX_HEAD_SIZE and hq // k.shape[1] <= MAX_GROUP, "attention", "D <= 1024 and Hq/Hkv <= 256", q.shape)
    second = (None, None, None, None)
    if k2 is not None:
        assert v2 is not None and begin2 is not None and end2 is not None, "k2 comes with v2, begin2 and end2"
        _check_keys(q, k2, v2, begin2, end2)
        require(k2.shape[1] == k.shape[1], "attention", f"{k.shape[1]} heads in k2", k2.shape[1])
        second = (k2.data_ptr(), v2.data_ptr(), begin2.data_ptr(), end2.data_ptr())
    out = torch.empty_like(q)
    starts = torch.empty(n + 1, dtype=torch.int64)
    failed = lib().dspark_attention(
        out.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), begin.data_ptr(), end.data_ptr(), *second,
        starts.data_ptr(), n, hq, k.shape[1], d, scale, code, threads(),
    )  # fmt: skip
    if failed:
        out_of_memory("attention")
    return out
