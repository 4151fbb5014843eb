"""Proof on this machine that the operations are invariant for the weights in use, and a record of what computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import dspark_kernels
from dspark.contracts import DsparkError
from dspark.ops.attention import attention
from dspark.ops.cpu.native import lib, threads
from dspark.ops.linear import linear
from dspark.ops.rows import rms_norm, silu_mul
from dspark.ops.sampling import raw_logprob

ROW_COUNTS = (1, 2, 5, 6, 7, 13, 32)


def fingerprint() -> dict[str, Any]:
    """What the bits of the ops belong to: CPU, instruction set, compiler, kernel sources, threads, torch build."""
    wanted = ("avx2", "avx512f", "fma", "asimd")
    return {
        "device": "cpu",
        "cpu": dspark_kernels.cpu_model(),
        "isa": [flag for flag in wanted if flag in dspark_kernels.cpu_flags()],
        "vector_width": int(lib().dspark_vector_width()),
        "compiler": dspark_kernels.compiler_version(),
        "kernels": dspark_kernels.source_hash(),
        "threads": int(threads()),
        "torch": torch.__version__,
    }


def self_test(weights: Mapping[str, Tensor], heads: tuple[int, int, int]) -> int:
    """Compares rows computed alone and in batches, for every weight [O, I] given (one per shape is enough), for
    attention with heads (query heads, key heads, head size), and for the row-wise operations at the weights' widths.

    Returns the number of rows compared; some 0.1 s for a small model, most of it for a vocabulary-wide head. Raises
    DsparkError naming the first operation and shape whose bits change.
    """
    with torch.inference_mode():
        compared = _check_attention(*heads, next(iter(weights.values())).dtype)
        for name, weight in {tuple(w.shape): (name, w) for name, w in weights.items()}.values():
            compared += _check_linear(name, weight)
        for width in {w.shape[1] for w in weights.values()}:
            compared += _check_rows(width, next(iter(weights.values())).dtype)
    return compared


def _draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _check_linear(name: str, weight: Tensor) -> int:
    x = _draw((max(ROW_COUNTS), weight.shape[1]), weight.dtype)
    whole = linear(x, weight, out_dtype=torch.float32)
    for n in ROW_COUNTS:
        what = f"linear {name} {weight.shape[0]}x{weight.shape[1]} {weight.dtype} with {n} rows"
        _compare(what, linear(x[-n:].contiguous(), weight, out_dtype=torch.float32), whole[-n:])
    _compare(f"raw_logprob over {weight.shape[0]} columns", _last_logprob(whole[-1:]), _last_logprob(whole)[-1:])
    return sum(ROW_COUNTS) + 1


def _last_logprob(logits: Tensor) -> Tensor:
    return raw_logprob(logits, torch.zeros(len(logits), dtype=torch.int64))


def _check_rows(width: int, dtype: torch.dtype) -> int:
    x, norm = _draw((9, 2 * width), dtype), _draw((2 * width,), dtype)
    _compare(f"rms_norm of {2 * width} {dtype}", rms_norm(x[4:5], norm, 1e-5), rms_norm(x, norm, 1e-5)[4:5])
    _compare(f"silu_mul of {width} {dtype}", silu_mul(x[4:5]), silu_mul(x)[4:5])
    return 2


def _check_attention(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    q, k, v = (_draw((40, h, head_dim), dtype) for h in (heads, kv_heads, kv_heads))
    begin, end = torch.zeros(40, dtype=torch.int64), torch.arange(1, 41)
    whole = attention(q, k, v, begin, end, 0.125)
    for n in (0, 7, 39):
        alone = attention(q[n : n + 1], k, v, begin[n : n + 1], end[n : n + 1], 0.125)
        _compare(f"attention {heads}/{kv_heads} heads of {head_dim} {dtype}, query {n}", alone, whole[n : n + 1])
    return 3


def _compare(what: str, got: Tensor, expected: Tensor) -> None:
    if not torch.equal(got, expected):
        raise DsparkError(
            f"self-test: expected {what} to give the same bits alone and in a batch, but they differ. Reproducible "
            "rollouts cannot be promised on this machine; report it with the output of `dspark doctor`."
        )
