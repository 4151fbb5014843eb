# mypy: disable-error-code="no-untyped-def"
"""Keyed noise, with the same bits as ``dspark/noise.py``, whose scheme and logarithm these are.

    word    = word number id % 4 of Philox-4x32-10,
              key = (low, high half of the seed), counter = (id // 4, position, stream, 0)
    uniform = ((word >> 9) + 0.5) / 2^23
    gumbel  = -ln(-ln uniform)
Integers are exact and the logarithm is made of single multiplies and adds, so there is one right answer. **Every kernel
that calls ``log_fp32`` must be launched with enable_fp_fusion=False**: a fused multiply-add would round once less. No
sum over elements, so nothing can depend on the batch.

``gumbel_run`` takes all four words of a call for four neighbouring ids; ``gumbel_at`` takes any ids, a call for each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.gpu.aot import Case
from dspark_kernels.gpu.arguments import INT64, check

_BLOCK = 1024
_MASK = 0xFFFFFFFF


@triton.jit
def unit(word):
    """uint32 words -> fp32 in (0, 1): the top 23 bits, centred in their cell. Exact."""
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def log_fp32(x):
    """ln x of positive normal fp32, within 1 ulp: the operations of dspark/noise.py in their order (Cephes logf)."""
    bits = x.to(tl.int32, bitcast=True)
    m = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    small = m < 0.707106781186547524
    exponent = ((bits >> 23) - 126 - small.to(tl.int32)).to(tl.float32)
    m = tl.where(small, m + m, m) - 1.0
    z = m * m
    y = m * 7.0376836292e-2 + -1.1514610310e-1
    y = y * m + 1.1676998740e-1
    y = y * m + -1.2420140846e-1
    y = y * m + 1.4249322787e-1
    y = y * m + -1.6668057665e-1
    y = y * m + 2.0000714765e-1
    y = y * m + -2.4999993993e-1
    y = y * m + 3.3333331174e-1
    y = y * m * z
    y = y - exponent * 2.12194440e-4
    y = y - z * 0.5
    return (m + y) + exponent * 0.693359375


@triton.jit
def gumbel_of(word):
    """uint32 words -> Gumbel(0, 1) noise, fp32."""
    return -log_fp32(-log_fp32(unit(word)))


@triton.jit
def words_at(seeds, stream, positions, ids):
    """The word of every token id. seeds, positions and ids are int64 and broadcast."""
    a, b, c, d = tl.philox(seeds, (ids >> 2).to(tl.uint32), positions.to(tl.uint32), stream, 0)
    word = ids & 3
    return tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d)))


@triton.jit
def words_run(seeds, stream, positions, first, COUNT: tl.constexpr):
    """The words of ids first .. first + COUNT - 1, along a new last axis: seeds and positions [R, 1] give [R, COUNT],
    scalars give [COUNT]. first and COUNT are multiples of 4."""
    call = first // 4 + tl.arange(0, COUNT // 4)
    a, b, c, d = tl.philox(seeds, call, positions.to(tl.uint32), stream, 0)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def gumbel_at(seeds, stream, positions, ids):
    return gumbel_of(words_at(seeds, stream, positions, ids))


@triton.jit
def gumbel_run(seeds, stream, positions, first, COUNT: tl.constexpr):
    return gumbel_of(words_run(seeds, stream, positions, first, COUNT))


@triton.jit(do_not_specialize=["v"])
def _gumbel(seeds, positions, token_ids, out, v, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(token_ids + column, mask=column < v, other=0)
    noise = gumbel_at(tl.load(seeds + row), STREAM, tl.load(positions + row), ids)
    tl.store(out + row.to(tl.int64) * v + column, noise, mask=column < v)


@triton.jit(do_not_specialize=["n"])
def _uniform(seeds, positions, out, n, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + row, mask=row < n, other=0)
    position = tl.load(positions + row, mask=row < n, other=0)
    tl.store(out + row, unit(words_at(seed, STREAM, position, tl.zeros_like(seed))), mask=row < n)


def gumbel(seeds: Tensor, stream: int, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel(0, 1) noise: seeds [N], positions [N], token_ids [V], all int64 -> [N, V] fp32. Raises ValueError on other
    shapes, dtypes or devices."""
    n, v = seeds.numel(), token_ids.numel()
    check("gumbel", seeds=(seeds, (n,), INT64), positions=(positions, (n,), INT64), token_ids=(token_ids, (v,), INT64))
    out = torch.empty((n, v), dtype=torch.float32, device=seeds.device)
    if n and v:
        grid = (n, triton.cdiv(v, _BLOCK))
        _gumbel[grid](seeds, positions, token_ids, out, v, STREAM=stream, BLOCK=_BLOCK, enable_fp_fusion=False)
    return out


def uniform(seeds: Tensor, stream: int, positions: Tensor) -> Tensor:
    """Uniform in (0, 1), the word of token id 0: seeds, positions [N] int64 -> [N] fp32. Raises as gumbel does."""
    n = seeds.numel()
    check("uniform", seeds=(seeds, (n,), INT64), positions=(positions, (n,), INT64))
    out = torch.empty(n, dtype=torch.float32, device=seeds.device)
    if n:
        grid = (triton.cdiv(n, _BLOCK),)
        _uniform[grid](seeds, positions, out, n, STREAM=stream, BLOCK=_BLOCK, enable_fp_fusion=False)
    return out


def _multiply(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """High and low half of a * m for 32-bit words in int64, in two steps that fit."""
    low, high = (a & 0xFFFF) * m, (a >> 16) * m
    middle = high + (low >> 16)
    return (middle >> 16) & _MASK, ((middle << 16) | (low & 0xFFFF)) & _MASK


def _unit_reference(seeds: Tensor, stream: int, positions: Tensor, token_ids: Tensor) -> Tensor:
    zero = torch.zeros_like(seeds + positions + token_ids)
    c0, c1, c2, c3 = zero + (token_ids >> 2), zero + (positions & _MASK), zero + stream, zero
    k0, k1 = seeds & _MASK, (seeds >> 32) & _MASK
    for _ in range(10):
        (high0, low0), (high1, low1) = _multiply(c0, 0xD2511F53), _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    word = torch.stack((c0, c1, c2, c3)).gather(0, ((zero + token_ids) & 3)[None])[0]
    return ((word >> 9).double() + 0.5) * 2.0**-23


def gumbel_reference(seeds: Tensor, stream: int, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The true logarithms in fp64, rounded once; ``dspark/noise.py`` holds the bits."""
    u = _unit_reference(seeds[:, None], stream, positions[:, None], token_ids[None, :])
    return -(-u.log()).log().float()


def uniform_reference(seeds: Tensor, stream: int, positions: Tensor) -> Tensor:
    return _unit_reference(seeds, stream, positions, torch.zeros_like(seeds)).float()


AOT = [
    Case(
        "philox.gumbel", _gumbel,
        {"seeds": "*i64", "positions": "*i64", "token_ids": "*i64", "out": "*fp32", "v": "i32"},
        {"STREAM": 3, "BLOCK": _BLOCK}, fp_fusion=False,
    ),
    Case(
        "philox.uniform", _uniform, {"seeds": "*i64", "positions": "*i64", "out": "*fp32", "n": "i32"},
        {"STREAM": 2, "BLOCK": _BLOCK}, fp_fusion=False,
    ),
]  # fmt: skip
