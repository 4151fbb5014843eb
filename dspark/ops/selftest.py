"""Proof on this machine that the operations are invariant for the weights in use, and a record of what computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import dspark_kernels
from dspark.contracts import DsparkError
from dspark.ops.attention import attention
from dspark.ops.cpu.native import lib, threads
from dspark.ops.linear import linear
from dspark.ops.rows import add_rms_norm, rms_norm, rotary, silu_mul
from dspark.ops.sampling import (
    gumbel_argmax,
    law_logprob,
    log_of,
    log_softmax,
    raw_logprob,
    shape_probs,
    uniform,
)

ROW_COUNTS = (1, 2, 5, 6, 7, 13)  # of a call
ROWS = 32  # of the call they are compared with


def fingerprint() -> dict[str, Any]:
    """What the bits of the ops belong to: CPU, instruction set, compiler, kernel sources, threads, torch build."""
    wanted = ("avx2", "avx512f", "avx512_bf16", "fma", "asimd")
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
    """Compares rows computed alone and in batches, for every operation: matrix products with each weight [O, I] given
    (one of each shape is enough), attention and rotary with heads (query heads, key heads, head size), norms and the
    gated activation at the weights' widths, laws, draws and log-probabilities over the widest weight's columns.

    Returns the number of rows compared; some half a second for a small model, most of it for a vocabulary-wide head.
    Raises DsparkError naming the first operation and shape whose bits change.
    """
    shapes = {tuple(w.shape): (name, w) for name, w in weights.items()}
    dtype = next(iter(weights.values())).dtype
    broken = [name for name, weight in weights.items() if not bool(weight.isfinite().all())]
    if broken:
        raise DsparkError(
            f"target weights: expected finite numbers, but {', '.join(broken)} of the first layer holds NaN or "
            "infinity. The checkpoint is broken: fetch it again."
        )
    with torch.inference_mode():
        checks = [
            *(_linear_check(name, weight) for name, weight in shapes.values()),
            *(check for width in {i for _, i in shapes} for check in _row_checks(width, dtype)),
            *_head_checks(*heads, dtype), *_law_checks(max(o for o, _ in shapes)),
        ]  # fmt: skip
        return sum(_compare(what, compute, rows) for what, compute, rows in checks)


Check = tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]  # what it is, the operation, its inputs with a row each


def _draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _linear_check(name: str, weight: Tensor) -> Check:
    o, i = weight.shape
    bias = _draw(o, dtype=weight.dtype)
    what = f"linear {name} {o}x{i} {weight.dtype}"
    return what, lambda x: linear(x, weight, bias, torch.float32), (_draw(ROWS, i, dtype=weight.dtype),)


def _row_checks(width: int, dtype: torch.dtype) -> list[Check]:
    x, norm = _draw(ROWS, width, dtype=dtype), _draw(width, dtype=dtype)
    return [
        (f"rms_norm of {width} {dtype}", lambda x: rms_norm(x, norm, 1e-5), (x,)),
        (f"add_rms_norm of {width} {dtype}", lambda a, b: torch.cat(add_rms_norm(a, b, norm, 1e-5)), (x, x.flip(0))),
        (f"silu_mul of {width} {dtype}", silu_mul, (_draw(ROWS, 2 * width, dtype=dtype),)),
    ]


def _head_checks(heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> list[Check]:
    """Attention of a window and of a whole context, with a second range beside it; keys of 300 rows."""
    q, angle = _draw(ROWS, heads, d, dtype=dtype), _draw(ROWS, d // 2)
    k, v = _draw(300, kv_heads, d, dtype=dtype), _draw(300, kv_heads, d, dtype=dtype).flip(0)
    end = torch.arange(ROWS) * 9 + 1
    begin, own = torch.where(torch.arange(ROWS) % 2 == 0, 0, (end - 20).clamp_min(0)), torch.arange(ROWS)
    what = f"{heads}/{kv_heads} heads of {d} {dtype}"

    def attend(q: Tensor, begin: Tensor, end: Tensor, own: Tensor) -> Tensor:
        return attention(q, k, v, begin, end, 0.125, k, v, own, own + 5)

    return [
        (f"attention {what}", attend, (q, begin, end, own)),
        (f"rotary {what}", rotary, (q, angle.cos().contiguous(), angle.sin().contiguous())),
    ]


def _law_checks(columns: int) -> list[Check]:
    logits, keys = 3 * _draw(ROWS, columns), torch.arange(ROWS)
    heat, top_k, top_p, min_p = torch.ones(ROWS), keys % 3 * 20, 1.0 - 0.1 * (keys % 2), torch.zeros(ROWS)
    probs = logits.softmax(-1)
    over = f"over {columns} columns"
    return [
        (f"shape_probs {over}", shape_probs, (logits, heat, top_k, top_p, min_p)),
        (f"gumbel_argmax {over}", lambda p, s: gumbel_argmax(p, s, 0, s), (probs, keys)),
        (f"log_of {over}", log_of, (probs, keys % columns)),
        (f"log_softmax {over}", log_softmax, (logits,)),
        (f"raw_logprob {over}", raw_logprob, (logits, keys % columns)),
        (f"law_logprob {over}", law_logprob, (logits, keys % columns, heat, top_k, top_p, min_p)),
        ("uniform of a key", lambda s: uniform(s, 2, s), (keys,)),
    ]


def bits(t: Tensor) -> Tensor:
    """The bits of a tensor of 2, 4 or 8 bytes an element as integers: NaN equals NaN, and 0 is not -0."""
    return t.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def _compare(what: str, compute: Callable[..., Tensor], rows: tuple[Tensor, ...]) -> int:
    """Rows compared: the first and last n in calls of their own against one call of all."""
    whole = compute(*rows).unflatten(0, (-1, ROWS))  # an operation of two results has two blocks of rows
    for n in ROW_COUNTS:
        for part in (slice(0, n), slice(ROWS - n, ROWS)):
            got = compute(*(t[part].contiguous() for t in rows)).unflatten(0, (-1, n))
            if not torch.equal(bits(got), bits(whole[:, part])):
                raise DsparkError(
                    f"self-test: expected {what} to give the same bits in a call of {n} rows and in one of {ROWS}, but "
                    "they differ. Reproducible rollouts cannot be promised on this machine; report it with the output "
                    "of `dspark doctor`."
                )
    return 2 * sum(ROW_COUNTS)
