# mypy: disable-error-code="no-untyped-def"
"""One sampling step of the Markov head, fused: gather, low-rank bias, keyed Gumbel-argmax; the noise is never stored.

    logits[n, v] = base[n, v] + sum_k W2[v, k] W1[previous[n], k]
    index[n]     = argmax_v logits[n, v] / T[n] + G(seed[n], stream, position[n], id[v]);  T = 0: argmax_v logits[n, v]
The sum over k: blocks of 64 (bf16), 32 (fp32) or 16 (a rank that is no multiple of 16) in ascending order into one
fp32 accumulator; the rank is padded to a power of two with zeros. A tile is always 16 rows by 128 columns, so every
element comes from the same instructions in the same order whatever the row count, and no element reads its neighbours.
The argmax is exact: the best of each block of columns, then the first best block; equal scores go to the lower column.
W2 is read once per tile of 16 rows.

Nothing can be raised from here, so what the CPU ops refuse comes out as index -1: a row with NaN, +inf or no finite
logit, or whose previous token lies outside W1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.gpu.aot import Case
from dspark_kernels.gpu.arguments import FLOATS, FP32, INT64, TRITON_TYPE, aligned, check, interpreting, matrix
from dspark_kernels.gpu.philox import gumbel_at, gumbel_reference, gumbel_run

MAX_RANK = 512
_ROWS, _COLUMNS = 16, 128
_CHUNK = {torch.float32: 32, torch.bfloat16: 64}  # fp32 has no tensor core here: 64 would not fit the registers
_REDUCE = 1024


@triton.jit
def keep_first_best(score, first):
    """score [..., C] of columns first .. first + C - 1 -> the best score [...] and the lowest column that has it.
    NaN counts as +inf, so that it cannot hide behind a finite score."""
    score = tl.where(score == score, score, float("inf"))
    best, at = tl.max(score, axis=len(score.shape) - 1, return_indices=True)
    return best, first + at


@triton.jit
def first_best(best, column, blocks, BLOCK: tl.constexpr):
    """The best of ``blocks`` scores at pointer best, in block order, and the column beside it; (-inf, -1) when all are
    -inf. The first of equals, so the lowest column."""
    top = float("-inf")
    winner = -1
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        score, at = tl.max(tl.load(best + block, mask=block < blocks, other=float("-inf")), axis=0, return_indices=True)
        found = tl.load(column + start + at)
        winner = tl.where(score > top, found, winner)
        top = tl.maximum(top, score)
    return top, winner


@triton.jit
def _bias(w1, w2, previous, inside, column, v, rank, RANK: tl.constexpr, CHUNK: tl.constexpr, WIDEN: tl.constexpr):
    """W1[previous] W2^T for one tile: [rows, columns] fp32."""
    total = tl.zeros((previous.shape[0], column.shape[0]), tl.float32)
    for start in range(0, RANK, CHUNK):
        k = start + tl.arange(0, CHUNK)
        e_mask = inside[:, None] & (k < rank)[None, :]
        e = tl.load(w1 + previous[:, None] * rank + k[None, :], mask=e_mask, other=0.0)
        w_mask = (column < v)[None, :] & (k < rank)[:, None]
        w = tl.load(w2 + column.to(tl.int64)[None, :] * rank + k[:, None], mask=w_mask, other=0.0)
        if WIDEN:  # the interpreter multiplies the bits of bf16 as integers
            e, w = e.to(tl.float32), w.to(tl.float32)
        total = tl.dot(e, w, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["n"])
def _best_of_block(
    base, w1, w2, previous, temperature, seeds, positions, token_ids, logits, best, column_of, n, v, rank, vocab,
    STREAM: tl.constexpr, IDS: tl.constexpr, STORE: tl.constexpr, WIDEN: tl.constexpr, RANK: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    live = row < n
    before = tl.load(previous + row, mask=live, other=0)
    inside = (before >= 0) & (before < vocab)
    bias = _bias(w1, w2, before, live & inside, column, v, rank, RANK, CHUNK, WIDEN)

    at = row.to(tl.int64)[:, None] * v + column[None, :]
    mask = live[:, None] & (column < v)[None, :]
    total = tl.load(base + at, mask=mask, other=0.0) + bias
    total = tl.where(inside[:, None], total, float("nan"))
    if STORE:
        tl.store(logits + at, total, mask=mask)

    seed = tl.load(seeds + row, mask=live, other=0)[:, None]
    position = tl.load(positions + row, mask=live, other=0)[:, None]
    if IDS:
        noise = gumbel_at(seed, STREAM, position, tl.load(token_ids + column, mask=column < v, other=0)[None, :])
    else:
        noise = gumbel_run(seed, STREAM, position, first, COLUMNS)
    heat = tl.load(temperature + row, mask=live, other=0.0)[:, None]
    drawn = tl.math.div_rn(total, tl.where(heat == 0.0, 1.0, heat)) + noise
    score = tl.where(heat == 0.0, total, drawn)
    value, winner = keep_first_best(tl.where((column < v)[None, :], score, float("-inf")), first)
    block = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + block, value, mask=live)
    tl.store(column_of + block, winner, mask=live)


@triton.jit
def best_of_row(best, column_of, index, blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top, winner = first_best(best + row * blocks, column_of + row * blocks, blocks, BLOCK)
    tl.store(index + row, tl.where(top < float("inf"), winner, -1).to(tl.int64))


def sample(
    base_logits: Tensor,
    w1: Tensor,
    w2: Tensor,
    previous: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    stream: int,
    positions: Tensor,
    token_ids: Tensor | None = None,
    store_logits: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(column index [N] int64, biased logits [N, V] fp32 or None).

    base_logits [N, V] fp32; w1 [Vocab, r] and w2 [V, r], both fp32 or both bf16, r <= 512; previous [N] int64, a row of
    w1 each; temperature [N] fp32, 0 = no noise; seeds, positions [N] int64; token_ids [V] int64 maps columns to
    vocabulary ids for the noise, None: column = id. Raises ValueError on other shapes, dtypes or devices.
    """
    (n, v), (vocab, rank) = matrix("sample", "base_logits", base_logits), matrix("sample", "w1", w1)
    keys = {"previous": previous, "seeds": seeds, "positions": positions}
    check(
        "sample", base_logits=(base_logits, (n, v), FP32), w1=(w1, (vocab, rank), FLOATS),
        w2=(w2, (v, rank), (w1.dtype,)), temperature=(temperature, (n,), FP32),
        **{name: (tensor, (n,), INT64) for name, tensor in keys.items()},
        **({} if token_ids is None else {"token_ids": (token_ids, (v,), INT64)}),
    )  # fmt: skip
    if not 1 <= rank <= MAX_RANK or not v:
        raise ValueError(f"sample: expected a rank of 1 to {MAX_RANK} and a column, but got w2 {list(w2.shape)}.")
    device, blocks = base_logits.device, triton.cdiv(v, _COLUMNS)
    index = torch.empty(n, dtype=torch.int64, device=device)
    logits = torch.empty((n, v), dtype=torch.float32, device=device) if store_logits else None
    best = torch.empty((n, blocks), dtype=torch.float32, device=device)
    column_of = torch.empty((n, blocks), dtype=torch.int32, device=device)
    if n:
        _best_of_block[(triton.cdiv(n, _ROWS), blocks)](
            aligned(base_logits), aligned(w1), aligned(w2), previous, temperature, seeds, positions,
            seeds if token_ids is None else token_ids, best if logits is None else logits, best, column_of,
            n, v, rank, vocab, STREAM=stream, WIDEN=interpreting(),
            **_constants(w1.dtype, rank, token_ids is not None, store_logits), enable_fp_fusion=False,
        )  # fmt: skip
        best_of_row[(n,)](best, column_of, index, blocks, BLOCK=_REDUCE)
    return index, logits


def _constants(kind: torch.dtype, rank: int, ids: bool, store: bool) -> dict[str, int | bool]:
    padded = max(16, triton.next_power_of_2(rank))
    chunk = min(padded, _CHUNK[kind]) if rank % 16 == 0 else 16  # a ragged rank is loaded element by element
    return {
        "IDS": ids, "STORE": store, "RANK": padded, "CHUNK": chunk, "ROWS": _ROWS, "COLUMNS": _COLUMNS
    }  # fmt: skip


def sample_reference(
    base_logits: Tensor,
    w1: Tensor,
    w2: Tensor,
    previous: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    stream: int,
    positions: Tensor,
    token_ids: Tensor | None = None,
    store_logits: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """In fp64 on the given values; the logits rounded once."""
    logits = base_logits.double() + w1.double()[previous] @ w2.double().T
    ids = torch.arange(w2.shape[0], device=w2.device) if token_ids is None else token_ids
    heat = temperature.double()[:, None]
    drawn = logits / torch.where(heat == 0, 1.0, heat) + gumbel_reference(seeds, stream, positions, ids)
    index = torch.where(heat == 0, logits, drawn).argmax(-1)
    return index, logits.float() if store_logits else None


def _case(kind: torch.dtype, rank: int, ids: bool, store: bool) -> Case:
    weights, name = "*" + TRITON_TYPE[kind], f"markov.block.{TRITON_TYPE[kind]}.r{rank}"
    pointers = {"base": "*fp32", "w1": weights, "w2": weights, "temperature": "*fp32", "logits": "*fp32"}
    pointers |= dict.fromkeys(("previous", "seeds", "positions", "token_ids"), "*i64")
    pointers |= {"best": "*fp32", "column_of": "*i32"}
    size = "i32" if rank % 16 else "i32:16"
    return Case(
        f"{name}{'.ids' * ids}{'.store' * store}", _best_of_block,
        pointers | {"n": "i32", "v": size, "rank": size, "vocab": size},
        {"STREAM": 0, "WIDEN": False, **_constants(kind, rank, ids, store)}, fp_fusion=False,
    )  # fmt: skip


AOT = [
    *(_case(kind, rank, False, False) for kind in FLOATS for rank in (16, 64, 500, 512)),
    *(_case(kind, 256, True, True) for kind in FLOATS),
    Case(
        "markov.row", best_of_row, {"best": "*fp32", "column_of": "*i32", "index": "*i64", "blocks": "i32"},
        {"BLOCK": _REDUCE},
    ),
]  # fmt: skip
