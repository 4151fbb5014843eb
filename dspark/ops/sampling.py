"""From logits to tokens: shaped laws, keyed Gumbel-argmax, uniforms, log-probabilities. All fp32, each row alone."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.ops.native import check, lib, out_of_memory, require, threads


def _check_rows(op: str, table: Tensor, *rows: tuple[Tensor, torch.dtype]) -> tuple[int, int]:
    check(op, table, *(t for t, _ in rows))
    require(table.dtype == torch.float32 and table.dim() == 2, op, "a float32 table [N, V]", (table.dtype, table.shape))
    n, v = table.shape
    for t, dtype in rows:
        if t.shape != (n,) or t.dtype != dtype:
            require(False, op, f"one {dtype} per row [{n}]", (tuple(t.shape), t.dtype))
    return n, v


def _check_ids(op: str, ids: Tensor, v: int) -> None:
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= v):
        require(False, op, f"ids in [0, {v})", f"{int(ids.min())}..{int(ids.max())}")


def _finish(op: str, status: int) -> None:
    if status & 1:
        out_of_memory(op)
    if status & 2:
        raise DsparkError(
            f"{op}: expected logits without NaN or +inf and with at least one finite entry per row, but a row breaks "
            "that. The model's weights or inputs are broken, or the dtype overflowed."
        )


def shape_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The law a token is drawn from: logits[N, V] fp32 -> probabilities [N, V] fp32, zero off the support.

    softmax(logits / temperature), then the top_k largest (0 = all), then the shortest prefix of the largest with
    mass >= top_p of what is left (1 = all), then p >= min_p * max; renormalised. Ties: lower token id first.
    Temperature 0: one-hot at the lowest-id argmax. temperature, top_p, min_p [N] fp32; top_k [N] int64.
    Raises DsparkError when a row holds NaN, +inf or no finite logit. Reference: dspark.probability.shape.
    """
    f, i = torch.float32, torch.int64
    n, v = _check_rows("shape_probs", logits, (temperature, f), (top_k, i), (top_p, f), (min_p, f))
    out = torch.empty_like(logits)
    _finish("shape_probs", lib().dspark_shape_probs(
        out.data_ptr(), logits.data_ptr(), temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(),
        min_p.data_ptr(), n, v, threads(),
    ))  # fmt: skip
    return out


def gumbel_argmax(
    probs: Tensor, seeds: Tensor, stream: int, positions: Tensor, token_ids: Tensor | None = None
) -> Tensor:
    """argmax over the support of ln p + G(seed, stream, position, token id) -> column index [N] int64.

    probs[N, V] fp32 (need not sum to one); seeds, positions [N] int64; token_ids[V] int64 ascending maps columns to
    vocabulary ids, None: column = id. Ties go to the lower column. Raises DsparkError when a row has no support.
    """
    n, v = _check_rows("gumbel_argmax", probs, (seeds, torch.int64), (positions, torch.int64))
    ids = None
    if token_ids is not None:
        check("gumbel_argmax", token_ids)
        good = token_ids.shape == (v,) and token_ids.dtype == torch.int64
        require(good, "gumbel_argmax", f"token_ids [{v}] int64", (tuple(token_ids.shape), token_ids.dtype))
        ids = token_ids.data_ptr()
    index = torch.empty(n, dtype=torch.int64)
    without = lib().dspark_gumbel_argmax(
        index.data_ptr(), probs.data_ptr(), seeds.data_ptr(), positions.data_ptr(), ids, stream, n, v, threads()
    )
    if without:
        raise DsparkError(
            f"gumbel_argmax: expected a positive probability in every row, but {without} of {n} rows have none."
        )
    return index


def uniform(seeds: Tensor, stream: int, positions: Tensor) -> Tensor:
    """One number in (0, 1) per row, of 23 bits: [N] fp32, a function of (seed, stream, position) alone."""
    check("uniform", seeds, positions)
    good = seeds.shape == positions.shape and seeds.dtype == positions.dtype == torch.int64
    require(good, "uniform", "seeds and positions [N] int64", (seeds.shape, positions.shape))
    out = torch.empty(seeds.shape, dtype=torch.float32)
    lib().dspark_uniform(out.data_ptr(), seeds.data_ptr(), positions.data_ptr(), stream, seeds.numel())
    return out


def raw_logprob(logits: Tensor, ids: Tensor) -> Tensor:
    """log_softmax(logits[N, V])[n, ids[n]] at temperature 1 -> [N] fp32. Raises DsparkError as shape_probs does."""
    n, v = _check_rows("raw_logprob", logits, (ids, torch.int64))
    _check_ids("raw_logprob", ids, v)
    out = torch.empty(n, dtype=torch.float32)
    _finish("raw_logprob", lib().dspark_raw_logprob(
        out.data_ptr(), logits.data_ptr(), ids.data_ptr(), n, v, threads()
    ))  # fmt: skip
    return out


def log_of(probs: Tensor, ids: Tensor) -> Tensor:
    """ln probs[n, ids[n]] -> [N] fp32; -inf where the entry is 0."""
    n, v = _check_rows("log_of", probs, (ids, torch.int64))
    _check_ids("log_of", ids, v)
    out = torch.empty(n, dtype=torch.float32)
    lib().dspark_log_of(out.data_ptr(), probs.data_ptr(), ids.data_ptr(), n, v)
    return out
