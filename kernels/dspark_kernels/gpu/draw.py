# mypy: disable-error-code="no-untyped-def"
"""Keyed draws from laws, and their log-probabilities: what ``dspark.ops`` needs on a GPU beside the fused steps.

    index[n] = argmax_v ln p[n, v] + G(seed[n], stream, position[n], id[v]) over the support;  log_of = ln p[n, id[n]]
Single multiplies and adds (no fusion) and exact maxima, equal scores to the lower column: a row's result depends on
that row by construction, and is what the CPU kernels give.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.gpu.aot import Case
from dspark_kernels.gpu.arguments import FP32, INT64, check, matrix
from dspark_kernels.gpu.markov import best_of_row, keep_first_best
from dspark_kernels.gpu.philox import gumbel_at, gumbel_reference, gumbel_run
from dspark_kernels.gpu.verify import log_prob

_COLUMNS, _REDUCE, _BLOCK = 1024, 1024, 128


@triton.jit
def _best_of_block(
    probs, seeds, positions, token_ids, best, column_of, v,
    IDS: tl.constexpr, STREAM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    first = block * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    law = tl.load(probs + row.to(tl.int64) * v + column, mask=column < v, other=0.0)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    if IDS:
        noise = gumbel_at(seed, STREAM, position, tl.load(token_ids + column, mask=column < v, other=0))
    else:
        noise = gumbel_run(seed, STREAM, position, first, COLUMNS)
    score = tl.where(law > 0.0, log_prob(law) + noise, float("-inf"))
    value, winner = keep_first_best(tl.where(law == law, score, law), first)  # NaN stays, and makes the row's index -1
    tl.store(best + row * blocks + block, value)
    tl.store(column_of + row * blocks + block, winner)


@triton.jit
def _log_of(out, probs, ids, n, v, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row, mask=row < n, other=-1)
    known = (token >= 0) & (token < v)
    law = tl.load(probs + row.to(tl.int64) * v + token, mask=known, other=0.0)
    tl.store(out + row, tl.where(known, log_prob(law), float("nan")), mask=row < n)


def gumbel_argmax(
    probs: Tensor, seeds: Tensor, stream: int, positions: Tensor, token_ids: Tensor | None = None
) -> Tensor:
    """Column index [N] int64; -1 for a row with NaN or without support. probs [N, V] fp32, seeds and positions [N]
    int64, token_ids [V] int64 or None (column = id). Raises ValueError on other shapes, dtypes or devices."""
    n, v = matrix("gumbel_argmax", "probs", probs)
    check(
        "gumbel_argmax", probs=(probs, (n, v), FP32), seeds=(seeds, (n,), INT64), positions=(positions, (n,), INT64),
        **({} if token_ids is None else {"token_ids": (token_ids, (v,), INT64)}),
    )  # fmt: skip
    blocks = triton.cdiv(v, _COLUMNS)
    index = torch.empty(n, dtype=torch.int64, device=probs.device)
    best = torch.empty((n, blocks), dtype=torch.float32, device=probs.device)
    column_of = torch.empty((n, blocks), dtype=torch.int32, device=probs.device)
    if n:
        _best_of_block[(n, blocks)](
            probs, seeds, positions, seeds if token_ids is None else token_ids, best, column_of, v,
            IDS=token_ids is not None, STREAM=stream, COLUMNS=_COLUMNS, enable_fp_fusion=False,
        )  # fmt: skip
        best_of_row[(n,)](best, column_of, index, blocks, BLOCK=_REDUCE)
    return index


def gumbel_argmax_reference(
    probs: Tensor, seeds: Tensor, stream: int, positions: Tensor, token_ids: Tensor | None = None
) -> Tensor:
    """In fp64 on the given laws."""
    ids = torch.arange(probs.shape[1], device=probs.device) if token_ids is None else token_ids
    return (probs.double().log() + gumbel_reference(seeds, stream, positions, ids)).argmax(-1)


def log_of(probs: Tensor, ids: Tensor) -> Tensor:
    """ln probs[n, ids[n]] -> [N] fp32; -inf where the entry is 0, NaN where the id lies outside. Raises as
    gumbel_argmax does. Its reference is the one of this name in dspark_kernels/reference.py."""
    n, v = matrix("log_of", "probs", probs)
    check("log_of", probs=(probs, (n, v), FP32), ids=(ids, (n,), INT64))
    out = torch.empty(n, dtype=torch.float32, device=probs.device)
    if n:
        _log_of[(triton.cdiv(n, _BLOCK),)](out, probs, ids, n, v, BLOCK=_BLOCK, enable_fp_fusion=False)
    return out


def _block_case(ids: bool) -> Case:
    keys = dict.fromkeys(("seeds", "positions", "token_ids"), "*i64")
    signature = {"probs": "*fp32", **keys, "best": "*fp32", "column_of": "*i32", "v": "i32:16"}
    constants = {"IDS": ids, "STREAM": 0, "COLUMNS": _COLUMNS}
    return Case(f"draw.block{'.ids' * ids}", _best_of_block, signature, constants, fp_fusion=False)


AOT = [
    _block_case(False),
    _block_case(True),
    Case(
        "draw.log_of", _log_of, {"out": "*fp32", "probs": "*fp32", "ids": "*i64", "n": "i32", "v": "i32:16"},
        {"BLOCK": _BLOCK}, fp_fusion=False,
    ),
]  # fmt: skip
