# mypy: disable-error-code="no-untyped-def"
"""Rejection verification of a batch of drafted blocks (arXiv:2211.17192): the rejection verifier of
``dspark/runner/verify.py`` with the same noise, comparison and logarithm, so with the same tokens.

    draft j of a request is accepted while u q(x) < p(x), u = uniform(seed, ACCEPT, position)
    at the first rejection: argmax of ln (p - q)+ + G(seed, RESIDUAL, position, v); of ln p when p - q is nowhere > 0
    after the last acceptance: argmax of ln p + G(seed, TARGET, position, v)
The argmax is over the support, equal scores go to the lower id. Nothing is summed over the vocabulary (the residual
needs no normaliser), every score is made of single multiplies and adds (no fusion), a maximum is exact: the tokens of a
request depend on its own rows alone, by construction.

Three kernels: accepted counts, one program a request; the best of each block of columns of the row after the accepted
run; the best block. Nothing is read on the host.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.gpu.aot import Case
from dspark_kernels.gpu.arguments import FP32, INT64, check, matrix
from dspark_kernels.gpu.markov import first_best, keep_first_best
from dspark_kernels.gpu.philox import gumbel_reference, gumbel_run, log_fp32, uniform_reference, unit, words_at

TARGET, ACCEPT, RESIDUAL = 0, 2, 3  # streams of dspark/noise.py
_DRAFTS = 32  # looked at together
_COLUMNS = 1024
_REDUCE = 1024
_CONSTANTS = {"TARGET": TARGET, "RESIDUAL": RESIDUAL, "COLUMNS": _COLUMNS}


@triton.jit
def log_prob(p):
    """ln p; -inf at 0. A subnormal is scaled by 2^24 first, as vlog_prob in cpu/vec.h does."""
    tiny = p < 1.1754943508222875e-38
    y = log_fp32(tl.where(tiny, p * 16777216.0, p))
    y = tl.where(tiny, y - 16.6355323334, y)
    return tl.where(p > 0.0, y, float("-inf"))


@triton.jit
def _rows(offsets, request):
    """First target row of a request and its number of drafts. Draft j lies in draft row first - request + j, since
    every request before it has one target row more than drafts."""
    first = tl.load(offsets + request)
    return first, (tl.load(offsets + request + 1) - first - 1).to(tl.int32)


@triton.jit
def _count(
    target, draft, drafts, offsets, seeds, positions, accepted, v, ACCEPT: tl.constexpr, DRAFTS: tl.constexpr
):  # fmt: skip
    request = tl.program_id(0)
    first, length = _rows(offsets, request)
    kept = length
    for start in range(0, length, DRAFTS):
        j = start + tl.arange(0, DRAFTS)
        row, live = first + j, j < length
        token = tl.load(drafts + row - request, mask=live, other=-1)
        known = (token >= 0) & (token < v)  # a token that neither law knows is rejected, not read
        p = tl.load(target + row * v + token, mask=known, other=0.0)
        q = tl.load(draft + (row - request) * v + token, mask=known, other=0.0)
        seed = tl.load(seeds + row, mask=live, other=0)
        u = unit(words_at(seed, ACCEPT, tl.load(positions + row, mask=live, other=0), tl.zeros_like(seed)))
        kept = tl.minimum(kept, tl.min(tl.where(u * q < p, length, j), axis=0))
    tl.store(accepted + request, kept.to(tl.int64))


@triton.jit
def _offer(law, noise, first, best, column_of, block):
    score = tl.where(law > 0.0, log_prob(law) + noise, float("-inf"))
    value, winner = keep_first_best(score, first)
    tl.store(best + block, value)
    tl.store(column_of + block, winner)


@triton.jit
def _best_of_block(
    target, draft, offsets, seeds, positions, accepted, best, column_of, v,
    TARGET: tl.constexpr, RESIDUAL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Best score of one block under the residual law, and beside it under p, which takes over where p - q is empty."""
    request, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    offset, length = _rows(offsets, request)
    kept = tl.load(accepted + request)
    row, rejected = offset + kept, kept < length
    first = block * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    p = tl.load(target + row * v + column, mask=column < v, other=0.0)
    q = tl.load(draft + (row - request) * v + column, mask=(column < v) & rejected, other=0.0)
    stream = tl.where(rejected, RESIDUAL, TARGET)
    noise = gumbel_run(tl.load(seeds + row), stream, tl.load(positions + row), first, COLUMNS)
    place = request.to(tl.int64) * 2 * blocks + block
    _offer(tl.maximum(p - q, 0.0), noise, first, best, column_of, place)
    _offer(p, noise, first, best, column_of, place + blocks)


@triton.jit
def _best_of_row(best, column_of, tokens, blocks, BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    at = request * 2 * blocks
    rest, token = first_best(best + at, column_of + at, blocks, BLOCK)
    _, fallback = first_best(best + at + blocks, column_of + at + blocks, blocks, BLOCK)
    tl.store(tokens + request, tl.where(rest == float("-inf"), fallback, token).to(tl.int64))


def verify(
    target: Tensor, draft: Tensor, drafts: Tensor, offsets: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """(accepted drafts [R], the token emitted after them [R]), both int64.

    target [M, V] fp32: the sampling law of every row, M = sum (l + 1); draft [M - R, V] fp32: the law each draft was
    drawn from; drafts [M - R] int64; offsets [R + 1] int64, ascending from 0 to M: request r owns target rows
    offsets[r] .. offsets[r + 1] - 1, one for each of its l drafts and one more; seeds, positions [M] int64. A token is
    -1 where its law has no support. Wrong offsets are not seen (they lie on the device) and read other requests' rows.
    Raises ValueError on other shapes, dtypes or devices.
    """
    (m, v), requests = matrix("verify", "target", target), offsets.numel() - 1
    flat = (max(m - requests, 0),)
    check(
        "verify", target=(target, (m, v), FP32), draft=(draft, (*flat, v), FP32), drafts=(drafts, flat, INT64),
        offsets=(offsets, (requests + 1,), INT64), seeds=(seeds, (m,), INT64), positions=(positions, (m,), INT64),
    )  # fmt: skip
    accepted, tokens = (torch.empty(requests, dtype=torch.int64, device=target.device) for _ in range(2))
    if not requests:
        return accepted, tokens
    blocks = triton.cdiv(v, _COLUMNS)
    best = torch.empty((requests, 2, blocks), dtype=torch.float32, device=target.device)
    column_of = torch.empty((requests, 2, blocks), dtype=torch.int32, device=target.device)
    _count[(requests,)](
        target, draft, drafts, offsets, seeds, positions, accepted, v, ACCEPT=ACCEPT, DRAFTS=_DRAFTS, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    _best_of_block[(requests, blocks)](
        target, draft, offsets, seeds, positions, accepted, best, column_of, v, **_CONSTANTS, enable_fp_fusion=False
    )
    _best_of_row[(requests,)](best, column_of, tokens, blocks, BLOCK=_REDUCE)
    return accepted, tokens


def verify_reference(
    target: Tensor, draft: Tensor, drafts: Tensor, offsets: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Request by request, draft by draft; logarithms in fp64."""
    uniform = uniform_reference(seeds, ACCEPT, positions)
    ids = torch.arange(target.shape[1], device=target.device)
    counts, tokens = [], []
    for request, (first, end) in enumerate(pairwise(offsets.tolist())):
        row, law, stream = first, target[end - 1], TARGET
        while row < end - 1 and _passes(uniform[row], target[row], draft[row - request], drafts[row - request]):
            row += 1
        if row < end - 1:
            rest = (target[row] - draft[row - request]).clamp_min(0.0)
            law, stream = rest if bool(rest.any()) else target[row], RESIDUAL
        noise = gumbel_reference(seeds[row : row + 1], stream, positions[row : row + 1], ids)[0]
        counts.append(row - first)
        tokens.append(int((law.double().log() + noise).argmax()))
    return torch.tensor(counts, device=target.device), torch.tensor(tokens, device=target.device)


def _passes(u: Tensor, p: Tensor, q: Tensor, token: Tensor) -> bool:
    return bool(u * q[token] < p[token])


_LAWS = {"target": "*fp32", "draft": "*fp32"}
_KEYS = dict.fromkeys(("offsets", "seeds", "positions", "accepted"), "*i64")
_BEST = {"best": "*fp32", "column_of": "*i32"}
AOT = [
    Case(
        "verify.count", _count, {**_LAWS, "drafts": "*i64", **_KEYS, "v": "i32:16"},
        {"ACCEPT": ACCEPT, "DRAFTS": _DRAFTS}, num_warps=1, fp_fusion=False,
    ),
    Case("verify.block", _best_of_block, {**_LAWS, **_KEYS, **_BEST, "v": "i32:16"}, _CONSTANTS, fp_fusion=False),
    Case("verify.row", _best_of_row, {**_BEST, "tokens": "*i64", "blocks": "i32"}, {"BLOCK": _REDUCE}),
]  # fmt: skip
