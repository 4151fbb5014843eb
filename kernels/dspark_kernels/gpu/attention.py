# mypy: disable-error-code="no-untyped-def"
"""Attention over ranges of key rows: one path for prefill, decode, verification and the draft block. bf16 or fp32.

    out = sum_t exp(s_t - max s) v_t / sum_t exp(s_t - max s),   s_t = scale * q . k_t,   t over a query's own rows
Order of summation: a key's rank is its row minus ``base``, the first row of its sequence. Ranks are cut into splits of
256 and a split into blocks, both on that absolute grid. One program takes one split of one tile of queries and walks
it whole, block after block, with an online softmax that starts empty (FlashAttention 2, arXiv:2307.08691, in powers of
2). A second kernel joins the splits in ascending order, first range before second. A split without a key of a row
leaves that row exactly as it was; inside a split, keys a row does not see weigh exactly 0. So a row's bits depend on
its query, its keys and their ranks: not on the other queries of its tile, on how many splits others have, or on row
numbers in the arena. A tile is M rows of (query, head of the group) pairs, the same M for one query and for many: one
tensor core instruction.

``tiles`` lets consecutive queries of one sequence share the reading of keys. **Rows inside a tile's ranges must be
finite in v even for those of its queries that do not see them** (0 times NaN is NaN); without ``tiles``, rows outside a
query's ranges may hold anything. Left out on purpose: checking ranges against the arena (it would wait for the device),
and joining in registers instead of through memory: two accumulators spill on sm_80 from D = 128 on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.gpu.aot import Case
from dspark_kernels.gpu.arguments import FLOATS, INT64, TRITON_TYPE, aligned, check, interpreting

SPLIT = 256
MAX_HEAD_SIZE = 256
MAX_WORKSPACE = 256 << 20  # bytes of split results at a time, if one split of all queries is not more
_LOG2E = 1.4426950408889634
_JOINED = 4  # rows of one program of the second kernel
# Read one number at a time, so that their alignment decides nothing.
_INDICES = ["begin", "end", "base", "begin2", "end2", "base2", "tiles"]


@triton.jit
def _finite(peak):
    """peak, or 0 where it is -inf: -inf minus -inf is NaN, and 2^(-inf - 0) is the 0 that is meant."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _split(
    q, k, v, low, high, lowest, highest, scale,
    STRIDE: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """(max score, sum of weights, weighted sum of values) of one split of keys at k, v, for q [M, BLOCK_D]. Row m sees
    keys low[m]:high[m] of the split; all of them lie in lowest:highest."""
    peak, mass = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    mix, d = tl.zeros((M, BLOCK_D), tl.float32), tl.arange(0, BLOCK_D)
    walked = tl.where((lowest < SPLIT) & (highest > 0), SPLIT, 0)  # the whole split, or nothing
    for start in range(0, walked, N):
        key = start + tl.arange(0, N)
        mask = ((key >= lowest) & (key < highest))[:, None] & (d < D)[None, :]
        keys = tl.load(k + key[:, None] * STRIDE + d[None, :], mask=mask, other=0.0)
        values = tl.load(v + key[:, None] * STRIDE + d[None, :], mask=mask, other=0.0)
        if WIDEN:  # the interpreter cannot multiply bf16; products of two are exact in fp32
            keys = keys.to(tl.float32)
        score = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        visible = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        score = tl.where(visible, score, float("-inf"))
        top = tl.maximum(peak, tl.max(score, axis=1))
        safe = _finite(top)
        weight, shrink = tl.exp2(score - safe[:, None]), tl.exp2(peak - safe)
        peak, mass = top, mass * shrink + tl.sum(weight, axis=1)
        weight = weight.to(values.dtype)
        if WIDEN:
            weight, values = weight.to(tl.float32), values.to(tl.float32)
        mix = tl.dot(weight, values, mix * shrink[:, None], input_precision="ieee")
    return peak, mass, mix


@triton.jit(do_not_specialize=["split", "splits", "slot", "slots"], do_not_specialize_on_alignment=_INDICES)
def _attend(
    peaks, masses, mixes, q, k, v, begin, end, base, k2, v2, begin2, end2, base2, tiles, scale,
    split, splits, slot, slots,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCKS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Splits from number ``split`` on, of which range one has ``splits``, into slots from ``slot`` on."""
    GROUP: tl.constexpr = HQ // HKV
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    first, count = tile.to(tl.int64), 1
    if tiles is not None:
        first, count = tl.load(tiles + 2 * first), tl.load(tiles + 2 * first + 1).to(tl.int32)
    head, split, slot = tl.program_id(1), split + tl.program_id(2), slot + tl.program_id(2)
    if k2 is not None:
        second = split >= splits
        k, v, base = tl.where(second, k2, k), tl.where(second, v2, v), tl.where(second, base2, base)
        begin, end, split = tl.where(second, begin2, begin), tl.where(second, end2, end), split - second * splits
    pair, d = block * M + tl.arange(0, M), tl.arange(0, BLOCK_D)
    real, query = pair < count * GROUP, first + pair // GROUP
    origin = tl.load(base + first) + split.to(tl.int64) * SPLIT
    low = (tl.load(begin + query, mask=real, other=0) - origin).to(tl.int32)
    high = (tl.load(end + query, mask=real, other=0) - origin).to(tl.int32)
    some = real & (low < high)
    high = tl.where(some, high, low)
    lowest, highest = tl.min(tl.where(some, low, SPLIT), axis=0), tl.max(tl.where(some, high, 0), axis=0)
    row = (pair // GROUP) * HQ + head * GROUP + pair % GROUP  # from the tile's first query on
    mask = real[:, None] & (d < D)[None, :]
    queries = tl.load(q + first * (HQ * D) + row[:, None] * D + d[None, :], mask=mask, other=0.0)
    if WIDEN:
        queries = queries.to(tl.float32)
    place = origin * (HKV * D) + head * D
    peak, mass, mix = _split(
        queries, k + place, v + place, low, high, lowest, highest, scale, HKV * D, D, M, N, BLOCK_D, SPLIT, WIDEN
    )
    to = (first * HQ + row) * slots + slot
    tl.store(masses + to, mass, mask=real)
    tl.store(peaks + to, peak, mask=real & (mass != 0.0))
    tl.store(mixes + (to * D)[:, None] + d[None, :], mix, mask=mask & (mass != 0.0)[:, None])
    if tiles is not None:  # a tile with more queries than a program's blocks hold: NaN rather than nothing
        for start in range((BLOCKS + block) * M, count * GROUP, BLOCKS * M):
            pair = start + tl.arange(0, M)
            to = ((first + pair // GROUP) * HQ + head * GROUP + pair % GROUP) * slots + slot
            tl.store(masses + to, tl.full((M,), float("nan"), tl.float32), mask=pair < count * GROUP)


@triton.jit
def _join(peak, mass, mix, peak1, mass1, mix1):
    """Two parts of a softmax, the earlier first. A part without keys (mass 0) leaves the other exactly as it is."""
    top = tl.maximum(peak, peak1)
    safe = _finite(top)
    old, new = tl.exp2(peak - safe), tl.exp2(peak1 - safe)
    joined, total = mix * old[:, None] + mix1 * new[:, None], mass * old + mass1 * new
    total = tl.where(mass == 0.0, mass1, tl.where(mass1 == 0.0, mass, total))
    joined = tl.where((mass == 0.0)[:, None], mix1, tl.where((mass1 == 0.0)[:, None], mix, joined))
    return top, total, joined


@triton.jit(do_not_specialize=["rows", "count", "slots"])
def _combine(
    out, peaks, masses, mixes, rows, count, slots,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Joins the first ``count`` of each row's ``slots`` and writes the quotient to out; KEEP: the join to slot 0."""
    row, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    real, mask = row < rows, (row < rows)[:, None] & (d < D)[None, :]
    peak, mass = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    mix = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for slot in range(count):
        place = row * slots + slot
        mass1 = tl.load(masses + place, mask=real, other=0.0)
        seen = mass1 != 0.0  # where no key was seen, mass is all that was written
        peak1 = tl.load(peaks + place, mask=seen, other=float("-inf"))
        mix1 = tl.load(mixes + (place * D)[:, None] + d[None, :], mask=mask & seen[:, None], other=0.0)
        peak, mass, mix = _join(peak, mass, mix, peak1, mass1, mix1)
    if KEEP:
        tl.store(peaks + row * slots, peak, mask=real)
        tl.store(masses + row * slots, mass, mask=real)
        tl.store(mixes + (row * slots * D)[:, None] + d[None, :], mix, mask=mask)
    mix = mix / tl.where(mass == 0.0, 1.0, mass)[:, None]
    tl.store(out + (row * D)[:, None] + d[None, :], mix.to(out.dtype.element_ty), mask=mask)


def _shape(d: int, dtype: torch.dtype) -> dict[str, int]:
    """Blocks of a head size and a dtype, never of anything else: M rows of a tile, N keys, and how a program runs."""
    block = max(16, triton.next_power_of_2(d))
    if dtype == torch.float32:
        cut = {"M": 16, "N": 32, "num_warps": 8, "num_stages": 2}
    elif block > 128:
        cut = {"M": 64, "N": 32, "num_warps": 8, "num_stages": 2}
    else:
        cut = {"M": 64, "N": 64 if block <= 64 else 32, "num_warps": 4, "num_stages": 3}
    return {"D": d, "BLOCK_D": block, "SPLIT": SPLIT, **cut}


def queries_of_tile(group: int) -> int:
    """The most queries a tile may have, of group = Hq / Hkv heads each."""
    return max(1, 64 // group)


def tiles_of(counts: Sequence[int], group: int) -> Tensor:
    """Cuts consecutive queries, counts[r] of sequence r, into tiles of one sequence each: [n, 2] int64 (first query,
    count), on the CPU. group = Hq / Hkv. Other cuts give the same bits, only slower."""
    most, cut, first = queries_of_tile(group), [], 0
    for count in counts:
        cut += [(first + start, min(most, count - start)) for start in range(0, count, most)]
        first += count
    return torch.tensor(cut, dtype=torch.int64).view(-1, 2)


Range = tuple[Tensor | None, ...]  # k, v, begin, end, base


def _range(q: Tensor, k: Tensor, v: Tensor | None, *index: Tensor | None, heads: int) -> Range:
    """The checked range; index: begin, end, base (None: begin)."""
    begin, end, base = index
    assert v is not None and begin is not None and end is not None, "keys come with values, begin and end"
    base = begin if base is None else base
    (n, _, d), kind = q.shape, (q.dtype,)
    shape = (k.shape[0], heads, d)
    check(
        "attention", q=(q, tuple(q.shape), FLOATS), k=(k, shape, kind), v=(v, shape, kind),
        begin=(begin, (n,), INT64), end=(end, (n,), INT64), base=(base, (n,), INT64),
    )  # fmt: skip
    return aligned(k), aligned(v), begin, end, base


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
    *,
    base: Tensor | None = None,
    base2: Tensor | None = None,
    tiles: Tensor | None = None,
    longest: int | None = None,
    longest2: int | None = None,
) -> Tensor:
    """q[N, Hq, D] over k, v [T, Hkv, D] -> [N, Hq, D]; query n sees rows begin[n]:end[n], then begin2:end2 of k2, v2.

    One softmax over both ranges; a query without any key gives zeros. Query head h reads key head h // (Hq / Hkv).
    base [N] int64, base[n] <= begin[n], is the first row of the query's sequence, from which ranks are counted
    (default: begin; another base is another order of summation). tiles [n_tiles, 2] int64 as of ``tiles_of``: queries
    of a tile must share base, so give it where begin moves (a sliding window); every query is in one tile, and what a
    tile has too much comes out as NaN. None: each query alone. longest >= end - base for all n (default T; a smaller
    bound saves empty programs, a wrong one loses keys). Raises ValueError on other dtypes, shapes or layouts.
    """
    if q.dim() != 3 or k.dim() != 3 or not 1 <= q.shape[2] <= MAX_HEAD_SIZE or q.shape[1] % max(1, k.shape[1]):
        raise ValueError(
            f"attention: expected q [N, Hq, D] and k [T, Hkv, D] with D from 1 to {MAX_HEAD_SIZE} and Hq divisible by "
            f"Hkv, but got {list(q.shape)} and {list(k.shape)}. Mend the arguments' shapes."
        )
    heads = k.shape[1]
    ranges = _range(q, k, v, begin, end, base, heads=heads)
    splits = [triton.cdiv(k.shape[0] if longest is None else longest, SPLIT)]
    if k2 is not None:
        ranges += _range(q, k2, v2, begin2, end2, base2, heads=heads)
        splits.append(triton.cdiv(k2.shape[0] if longest2 is None else longest2, SPLIT))
    if tiles is not None:
        check("attention", tiles=(tiles, (tiles.shape[0], 2), INT64), q=(q, tuple(q.shape), FLOATS))
    return _launch(q, (*ranges, *[None] * (10 - len(ranges)), tiles), scale, heads, splits)


def _launch(q: Tensor, arguments: Range, scale: float, heads: int, splits: list[int]) -> Tensor:
    """Splits go through the workspace in slabs that fit it. With more than one slab, slot 0 keeps the join so far."""
    (n, hq, d), total, shape = q.shape, max(1, sum(splits)), _shape(q.shape[2], q.dtype)
    out, tiles = torch.empty_like(q), arguments[-1]
    if not out.numel():
        return out
    slab = max(1, min(total, MAX_WORKSPACE // (4 * n * hq * d)))
    kept = int(slab < total)
    peaks, masses, mixes = (
        torch.empty((n, hq, kept + slab, *size), dtype=torch.float32, device=q.device) for size in ((), (), (d,))
    )
    masses[:, :, :kept] = 0.0
    group, count = hq // heads, n if tiles is None else tiles.shape[0]
    blocks = triton.cdiv(group * (1 if tiles is None else queries_of_tile(group)), shape["M"])
    for split in range(0, total, slab):
        now = min(slab, total - split)
        _attend[(count * blocks, heads, now)](
            peaks, masses, mixes, aligned(q), *arguments, scale * _LOG2E, split, splits[0], kept, kept + slab,
            HQ=hq, HKV=heads, BLOCKS=blocks, **shape, WIDEN=interpreting(), enable_fp_fusion=False,
        )  # fmt: skip
        _combine[(triton.cdiv(n * hq, _JOINED),)](
            out, peaks, masses, mixes, n * hq, kept + now, kept + slab,
            D=d, ROWS=_JOINED, BLOCK_D=shape["BLOCK_D"], KEEP=kept == 1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _case(dtype: torch.dtype, d: int, group: int, second: bool = True, tiles: bool = True) -> Case:
    kind, shape = TRITON_TYPE[dtype], _shape(d, dtype)
    warps, stages = shape.pop("num_warps"), shape.pop("num_stages")
    types = dict.fromkeys(["q", "k", "v", "k2", "v2"], f"*{kind}") | dict.fromkeys(_INDICES, "*i64")
    types |= dict.fromkeys(["peaks", "masses", "mixes"], "*fp32") | {"scale": "fp32"}
    types |= dict.fromkeys(["split", "splits", "slot", "slots"], "i32")
    absent = dict.fromkeys(["k2", "v2", "begin2", "end2", "base2"] * (not second) + ["tiles"] * (not tiles))
    blocks = triton.cdiv(group * (queries_of_tile(group) if tiles else 1), shape["M"])
    constants = {**absent, **shape, "HQ": 8 * group, "HKV": 8, "BLOCKS": blocks, "WIDEN": False}
    signature = {key: kind for key, kind in types.items() if key not in constants}
    name = f"attention.{kind}.{d}{'.second' * second}{'.tiles' * tiles}"
    return Case(name, _attend, signature, constants, warps, stages, fp_fusion=False)


def _combine_case(kind: str, d: int) -> Case:
    types = dict.fromkeys(["peaks", "masses", "mixes"], "*fp32") | dict.fromkeys(["rows", "count", "slots"], "i32")
    shape = {"D": d, "ROWS": _JOINED, "BLOCK_D": triton.next_power_of_2(d), "KEEP": d == MAX_HEAD_SIZE}
    return Case(f"attention.combine.{kind}.{d}", _combine, {**types, "out": f"*{kind}"}, shape, fp_fusion=False)


AOT = [
    *[_case(torch.bfloat16, d, group) for d, group in ((64, 3), (96, 4), (128, 4), (256, 2))],
    _case(torch.bfloat16, 128, 4, second=False),
    _case(torch.bfloat16, 128, 4, tiles=False),
    _case(torch.bfloat16, 128, 4, second=False, tiles=False),
    *[_case(torch.float32, d, group) for d, group in ((64, 3), (128, 4), (256, 2))],
    _combine_case("bf16", 128),
    _combine_case("fp32", 96),
    _combine_case("fp32", 256),
]
