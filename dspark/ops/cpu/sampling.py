"""Checks and calls of cpu/sampling.c and cpu/noise.c; what the functions mean stands in dspark/ops/sampling.py."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.ops.cpu.native import check, lib, raise_status, refuse, threads


def _check_rows(op: str, table: Tensor, *rows: tuple[Tensor, torch.dtype]) -> tuple[int, int]:
    check(op, table)
    if table.dtype != torch.float32 or table.dim() != 2:
        refuse(op, "a float32 table [N, V]", f"{tuple(table.shape)} of {table.dtype}")
    n, v = table.shape
    for t, dtype in rows:
        check(op, t)
        if t.shape != (n,) or t.dtype != dtype:
            refuse(op, f"one {dtype} per row [{n}]", f"{tuple(t.shape)} of {t.dtype}")
    return n, v


def shape_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    f, i = torch.float32, torch.int64
    n, v = _check_rows("shape_probs", logits, (temperature, f), (top_k, i), (top_p, f), (min_p, f))
    out = torch.empty_like(logits)
    status = lib().dspark_shape_probs(
        out.data_ptr(), logits.data_ptr(), temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(),
        min_p.data_ptr(), n, v, threads(),
    )  # fmt: skip
    if status:
        raise_status("shape_probs", status)
    return out


def gumbel_argmax(
    probs: Tensor, seeds: Tensor, stream: int, positions: Tensor, token_ids: Tensor | None = None
) -> Tensor:
    n, v = _check_rows("gumbel_argmax", probs, (seeds, torch.int64), (positions, torch.int64))
    ids = None
    if token_ids is not None:
        check("gumbel_argmax", token_ids)
        if token_ids.shape != (v,) or token_ids.dtype != torch.int64:
            refuse("gumbel_argmax", f"token_ids [{v}] of int64", f"{tuple(token_ids.shape)} of {token_ids.dtype}")
        ids = token_ids.data_ptr()
    index = torch.empty(n, dtype=torch.int64)
    without = lib().dspark_gumbel_argmax(
        index.data_ptr(), probs.data_ptr(), seeds.data_ptr(), positions.data_ptr(), ids, stream, n, v, threads()
    )
    if without:
        refuse("gumbel_argmax", "a positive probability in every row", f"{without} of {n} rows without any", "")
    return index


def uniform(seeds: Tensor, stream: int, positions: Tensor) -> Tensor:
    check("uniform", seeds, positions)
    if seeds.shape != positions.shape or not seeds.dtype == positions.dtype == torch.int64:
        refuse("uniform", "seeds and positions [N] of int64", f"{tuple(seeds.shape)} and {tuple(positions.shape)}")
    out = torch.empty(seeds.shape, dtype=torch.float32)
    lib().dspark_uniform(out.data_ptr(), seeds.data_ptr(), positions.data_ptr(), stream, seeds.numel())
    return out


def log_softmax(logits: Tensor) -> Tensor:
    n, v = _check_rows("log_softmax", logits)
    out = torch.empty_like(logits)
    status = lib().dspark_log_softmax(out.data_ptr(), logits.data_ptr(), n, v, threads())
    if status:
        raise_status("log_softmax", status)
    return out


def raw_logprob(logits: Tensor, ids: Tensor) -> Tensor:
    n, v = _check_rows("raw_logprob", logits, (ids, torch.int64))
    out = torch.empty(n, dtype=torch.float32)
    status = lib().dspark_raw_logprob(out.data_ptr(), logits.data_ptr(), ids.data_ptr(), n, v, threads())
    if status:
        raise_status("raw_logprob", status)
    return out


def log_of(probs: Tensor, ids: Tensor) -> Tensor:
    n, v = _check_rows("log_of", probs, (ids, torch.int64))
    out = torch.empty(n, dtype=torch.float32)
    status = lib().dspark_log_of(out.data_ptr(), probs.data_ptr(), ids.data_ptr(), n, v)
    if status:
        raise_status("log_of", status)
    return out
