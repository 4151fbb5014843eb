# mypy: disable-error-code="no-untyped-def"
"""The confidence of every row's slot: the probability that the verifier accepts its token.

    z = sum_i w_i h_i + sum_i w_{H+i} e_i + b;   confidence = sigmoid(z / T[slot])
One program a row. Lane j of 1024 holds a chain of fp32 FMAs over the elements i = j mod 1024 of h, then of e, in
ascending order; the lanes are added in one tree, then the bias. The tree is fixed by the block size, the warp count and
the vector width of the loads, and none of them depends on the number of rows; ``aligned`` keeps the width the same for
a row taken out of a tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.gpu.aot import Case
from dspark_kernels.gpu.arguments import FLOATS, FP32, INT64, TRITON_TYPE, aligned, check, matrix

_BLOCK = 1024


@triton.jit
def _add_products(lanes, x, w, size, BLOCK: tl.constexpr):
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        a = tl.load(x + i, mask=i < size, other=0.0).to(tl.float32)
        lanes = tl.fma(a, tl.load(w + i, mask=i < size, other=0.0).to(tl.float32), lanes)
    return lanes


@triton.jit
def _confidence(
    hidden, embedding, weight, bias, temperature, slot, out, width, rank, slots, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = _add_products(tl.zeros((BLOCK,), tl.float32), hidden + row * width, weight, width, BLOCK)
    lanes = _add_products(lanes, embedding + row * rank, weight + width, rank, BLOCK)
    place = tl.load(slot + row)
    known = (place >= 0) & (place < slots)  # no slot, no temperature: NaN rather than a read outside the table
    heat = tl.load(temperature + place, mask=known, other=float("nan"))
    z = tl.math.div_rn(tl.sum(lanes) + tl.load(bias).to(tl.float32), heat)
    small = tl.exp(-tl.abs(z))
    tl.store(out + row, tl.math.div_rn(tl.where(z >= 0.0, 1.0, small), 1.0 + small))


def confidence(
    hidden: Tensor, embedding: Tensor | None, weight: Tensor, bias: Tensor, temperature: Tensor, slot: Tensor
) -> Tensor:
    """sigmoid((w . [h; e] + b) / T[slot]) -> [N] fp32, in [0, 1]; NaN where the slot has no temperature.

    hidden [N, H], embedding [N, r] or None (a head without Markov input), weight [H + r], bias [1], all fp32 or all
    bf16; temperature [K] fp32 > 0; slot [N] int64. Raises ValueError on other shapes, dtypes or devices.
    """
    n, width = matrix("confidence", "hidden", hidden)
    rank = 0 if embedding is None else embedding.shape[-1]
    second = hidden if embedding is None else embedding
    kind = (hidden.dtype,)
    check(
        "confidence", hidden=(hidden, (n, width), FLOATS), embedding=(second, (n, rank or width), kind),
        weight=(weight, (width + rank,), kind), bias=(bias, (1,), kind), slot=(slot, (n,), INT64),
        temperature=(temperature, (temperature.numel(),), FP32),
    )  # fmt: skip
    out = torch.empty(n, dtype=torch.float32, device=hidden.device)
    if n:
        _confidence[(n,)](
            aligned(hidden), aligned(second), aligned(weight), bias, temperature, slot, out, width, rank,
            temperature.numel(), BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def confidence_reference(
    hidden: Tensor, embedding: Tensor | None, weight: Tensor, bias: Tensor, temperature: Tensor, slot: Tensor
) -> Tensor:
    """In fp64 on the given values, rounded once."""
    both = hidden if embedding is None else torch.cat((hidden, embedding), -1)
    z = both.double() @ weight.double() + bias.double()
    return (z / temperature.double()[slot]).sigmoid().float()


def _case(kind: str) -> Case:
    pointers = {"hidden": kind, "embedding": kind, "weight": kind, "bias": kind}
    pointers |= {"temperature": "*fp32", "slot": "*i64", "out": "*fp32"}
    return Case(
        f"confidence.{kind[1:]}", _confidence, pointers | {"width": "i32:16", "rank": "i32:16", "slots": "i32"},
        {"BLOCK": _BLOCK},
    )  # fmt: skip


AOT = [_case("*" + TRITON_TYPE[kind]) for kind in FLOATS]
