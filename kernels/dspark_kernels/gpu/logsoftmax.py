# mypy: disable-error-code="no-untyped-def"
"""Log-probabilities over the vocabulary: logits [N, V] fp32.

    m = max x,   L = ln sum exp(x - m),   logsumexp = m + L,   log_softmax(x)_i = (x_i - m) - L
Order of summation: the vocabulary is cut into splits of 8192, padded with -inf. Each split gives its own maximum and
the sum of exp(x - maximum), a fixed tree over the split's threads; a second kernel brings the splits to the common
maximum and sums them in a fixed tree over their numbers. Both trees depend on V alone. Every op starts from the (m, L)
of those two kernels and goes on with subtractions only, so raw_logprob equals log_softmax's entry in every bit.

-inf is an entry like any other as long as one of the row is finite; a row with NaN or +inf, or of -inf only, gives NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.gpu.aot import Case
from dspark_kernels.gpu.arguments import FP32, INT64, aligned, check

SPLIT = 8192
_WARPS = 8
_BLOCK = 2048  # entries of one program of _subtract
_ROWS = 128  # rows of one program of _pick
_MAX_VOCABULARY = 1 << 24


@triton.jit
def _finite(m):
    """m, or 0 where it is -inf: -inf minus -inf is NaN, and exp(-inf - 0) is the 0 that is meant."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _splits(peaks, sums, logits, v, SPLIT: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = split * SPLIT + tl.arange(0, SPLIT)
    x = tl.load(logits + row * v + column, mask=column < v, other=float("-inf"))
    m = tl.max(x, axis=0)
    place = row * tl.num_programs(1) + split
    tl.store(peaks + place, m)
    tl.store(sums + place, tl.sum(tl.exp(x - _finite(m)), axis=0))


@triton.jit
def _join(peak, log_sum, peaks, sums, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    m = tl.load(peaks + row * COUNT + split, mask=split < COUNT, other=float("-inf"))
    part = tl.load(sums + row * COUNT + split, mask=split < COUNT, other=0.0)
    top = tl.max(m, axis=0)
    tl.store(peak + row, top)
    tl.store(log_sum + row, tl.log(tl.sum(part * tl.exp(m - _finite(top)), axis=0)))


@triton.jit
def _subtract(out, logits, peak, log_sum, v, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * v + column, mask=column < v)
    tl.store(out + row * v + column, x - tl.load(peak + row) - tl.load(log_sum + row), mask=column < v)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["ids"])
def _pick(out, logits, ids, peak, log_sum, n, v, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(ids + row, mask=row < n, other=-1)
    x = tl.load(logits + row.to(tl.int64) * v + column, mask=(column >= 0) & (column < v), other=float("nan"))
    m, total = tl.load(peak + row, mask=row < n), tl.load(log_sum + row, mask=row < n)
    tl.store(out + row, x - m - total, mask=row < n)


def _statistics(op: str, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(m, L) of every row, [N] fp32 each."""
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= _MAX_VOCABULARY:
        raise ValueError(
            f"{op}: expected logits [N, V] with V from 1 to {_MAX_VOCABULARY}, but got {list(logits.shape)}. "
            "Mend the argument's shape."
        )
    n, v = logits.shape
    check(op, logits=(logits, (n, v), FP32))
    count = triton.cdiv(v, SPLIT)
    peaks, sums = (torch.empty((n, count), dtype=torch.float32, device=logits.device) for _ in range(2))
    peak, log_sum = (torch.empty(n, dtype=torch.float32, device=logits.device) for _ in range(2))
    if n:
        _splits[(n, count)](peaks, sums, aligned(logits), v, SPLIT=SPLIT, num_warps=_WARPS, enable_fp_fusion=False)
        block = triton.next_power_of_2(count)
        _join[(n,)](peak, log_sum, peaks, sums, COUNT=count, BLOCK=block, num_warps=1, enable_fp_fusion=False)
    return peak, log_sum


def logsumexp(logits: Tensor) -> Tensor:
    """ln sum exp of each row: [N, V] fp32 -> [N] fp32. Raises ValueError on other dtypes, shapes or layouts."""
    peak, log_sum = _statistics("logsumexp", logits)
    return peak + log_sum


def log_softmax(logits: Tensor) -> Tensor:
    """[N, V] fp32 -> [N, V] fp32. Raises ValueError on other dtypes, shapes or layouts."""
    peak, log_sum = _statistics("log_softmax", logits)
    n, v = logits.shape
    out = torch.empty_like(logits)
    if n:
        grid = (n, triton.cdiv(v, _BLOCK))
        _subtract[grid](out, aligned(logits), peak, log_sum, v, BLOCK=_BLOCK, enable_fp_fusion=False)
    return out


def raw_logprob(logits: Tensor, ids: Tensor) -> Tensor:
    """log_softmax(logits)[n, ids[n]]: [N, V] fp32 and [N] int64 -> [N] fp32, the same bits as log_softmax's entry.

    An id outside [0, V) gives NaN (looking at ids on the host would wait for the device). Raises ValueError on other
    dtypes, shapes or layouts.
    """
    peak, log_sum = _statistics("raw_logprob", logits)
    n, v = logits.shape
    check("raw_logprob", logits=(logits, (n, v), FP32), ids=(ids, (n,), INT64))
    out = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n:
        grid = (triton.cdiv(n, _ROWS),)
        _pick[grid](out, logits, ids, peak, log_sum, n, v, BLOCK=_ROWS, enable_fp_fusion=False)
    return out


def _case(name: str, kernel, signature: str, sizes: dict[str, str], constants: dict[str, int], warps: int = 4) -> Case:
    types = dict.fromkeys(signature.split(), "*fp32") | sizes
    return Case(f"logsoftmax.{name}", kernel, types, constants, warps, fp_fusion=False)


AOT = [
    _case("splits", _splits, "peaks sums logits", {"v": "i32:16"}, {"SPLIT": SPLIT}, _WARPS),
    _case("splits.ragged", _splits, "peaks sums logits", {"v": "i32"}, {"SPLIT": SPLIT}, _WARPS),
    _case("join", _join, "peak log_sum peaks sums", {}, {"COUNT": 19, "BLOCK": 32}, 1),
    _case("subtract", _subtract, "out logits peak log_sum", {"v": "i32:16"}, {"BLOCK": _BLOCK}),
    _case("pick", _pick, "out logits peak log_sum", {"ids": "*i64", "n": "i32", "v": "i32:16"}, {"BLOCK": _ROWS}),
]
