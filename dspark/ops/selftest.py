"""Proof on this machine that the ops are invariant for the shapes in use, and a record of what computed them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import dspark_kernels
from dspark.contracts import DsparkError
from dspark.ops.attention import attention
from dspark.ops.linear import linear
from dspark.ops.native import lib, threads

ROW_COUNTS = (1, 2, 5, 6, 7, 13, 32, 100)


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


def self_test(shapes: Iterable[tuple[int, int]], dtype: torch.dtype = torch.float32) -> None:
    """Compares rows computed alone and in batches, for every linear shape (O, I) given and for attention.

    Raises DsparkError naming the first op whose bits change. About a millisecond per million weights.
    """
    generator = torch.Generator().manual_seed(0)
    for o, i in dict.fromkeys(shapes):
        _check_linear(o, i, dtype, generator)
    _check_attention(dtype, generator)


def _check_linear(o: int, i: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    weight = torch.randn(o, i, generator=generator).to(dtype)
    x = torch.randn(max(ROW_COUNTS), i, generator=generator).to(dtype)
    whole = linear(x, weight)
    for n in ROW_COUNTS:
        _compare(f"linear {o}x{i} {dtype} with {n} rows", linear(x[-n:].contiguous(), weight), whole[-n:])


def _check_attention(dtype: torch.dtype, generator: torch.Generator) -> None:
    q, k, v = (torch.randn(40, h, 64, generator=generator).to(dtype) for h in (6, 2, 2))
    begin, end = torch.zeros(40, dtype=torch.int64), torch.arange(1, 41)
    whole = attention(q, k, v, begin, end, 0.125)
    for n in (0, 7, 39):
        alone = attention(q[n : n + 1], k, v, begin[n : n + 1], end[n : n + 1], 0.125)
        _compare(f"attention {dtype} of query {n}", alone, whole[n : n + 1])


def _compare(what: str, got: Tensor, expected: Tensor) -> None:
    if not torch.equal(got, expected):
        raise DsparkError(
            f"self-test: expected {what} to give the same bits alone and in a batch, but they differ. Reproducible "
            "rollouts cannot be promised on this machine; report it with the output of `dspark env`."
        )
