# mypy: disable-error-code="no-untyped-def"
"""x[N, I] @ weight[O, I].T (+ bias[O]): bf16, fp16 or fp32, summed in fp32, rounded once.

Order of summation: blocks of ``Blocks.inputs`` input features in ascending order, each added to the same accumulator by
one ``tl.dot`` (in fp32 a chain of FMAs; no TF32), then the bias. Blocks depend on the dtype and I, never on N; nothing
is split over programs and nothing is atomic, so a row's bits depend on that row and the weight. A tile always holds 64
rows: fewer would be another tensor core instruction on Hopper (mma instead of wgmma) and with it another order. Rows
past the last are copies of the last one and are not stored.

Programs are at most two for each multiprocessor, each walking many tiles. Tiles are numbered so that eight row tiles
share a weight tile while it is in L2. With up to 64 rows there are only as many tiles as blocks of 128 outputs: a small
layer leaves most of a large card idle.
Left out on purpose: TMA descriptors (sm_80 has none), split sums, autotuning.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.gpu.aot import Case
from dspark_kernels.gpu.arguments import aligned, check, interpreting


@dataclass(frozen=True, slots=True)
class Blocks:
    """One output tile (rows x outputs), the input features of one tl.dot, and how the program runs them."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


KINDS = (torch.bfloat16, torch.float16, torch.float32)


def blocks_of(i: int, dtype: torch.dtype) -> Blocks:
    """The blocks for a weight of i input features. Rows of a half type that are no multiple of 16 features are loaded
    element by element, through registers: there smaller tiles spill nothing."""
    if dtype == torch.float32:
        return Blocks(rows=64, outputs=64, inputs=16, num_warps=4, num_stages=3)
    if i % 16:
        return Blocks(rows=64, outputs=64, inputs=32, num_warps=4, num_stages=3)
    return Blocks(rows=64, outputs=128, inputs=64, num_warps=4, num_stages=3)


@triton.jit
def _place(tile, row_tiles, output_tiles, GROUP: tl.constexpr):
    """(row tile, output tile) of a tile's number: GROUP row tiles first, then the next output tile."""
    group = tile // (GROUP * output_tiles)
    within = tile % (GROUP * output_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    return group * GROUP + within % height, within // height


@triton.jit
def _product(
    x, weight, i,
    EVEN: tl.constexpr, WIDEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS, OUTPUTS] of row pointers x [ROWS, 1] and weight [OUTPUTS, 1], rows of i features."""
    acc = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, i, INPUTS):
        feature = (start + tl.arange(0, INPUTS))[None, :]
        if EVEN:
            a, b = tl.load(x + feature), tl.load(weight + feature)
        else:
            a = tl.load(x + feature, mask=feature < i, other=0.0)
            b = tl.load(weight + feature, mask=feature < i, other=0.0)
        if WIDEN:  # the interpreter cannot multiply bf16; products of two are exact in fp32
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["n"])
def _linear(
    x, weight, bias, out, n, o, i,
    EVEN: tl.constexpr, WIDEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    row_tiles, output_tiles = tl.cdiv(n, ROWS), tl.cdiv(o, OUTPUTS)
    for tile in range(tl.program_id(0), row_tiles * output_tiles, tl.num_programs(0)):
        row_tile, output_tile = _place(tile, row_tiles, output_tiles, 8)
        row, output = row_tile * ROWS + tl.arange(0, ROWS), output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
        real_row, real_output = tl.minimum(row, n - 1).to(tl.int64), tl.minimum(output, o - 1).to(tl.int64)
        rows, weights = x + (real_row * i)[:, None], weight + (real_output * i)[:, None]
        acc = _product(rows, weights, i, EVEN, WIDEN, ROWS, OUTPUTS, INPUTS)
        if bias is not None:
            acc += tl.load(bias + real_output).to(tl.float32)[None, :]
        mask = (row < n)[:, None] & (output < o)[None, :]
        tl.store(out + (real_row * o)[:, None] + output[None, :], acc.to(out.dtype.element_ty), mask=mask)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many the GPU has; 3 when interpreting, so that tests see programs that walk several tiles."""
    return 3 if interpreting() else int(torch.cuda.get_device_properties(device).multi_processor_count)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x[N, I] @ weight[O, I].T (+ bias[O]) -> [N, O] in ``out_dtype``: x's dtype (the default), or fp32, which keeps
    half products unrounded (an LM head). All of one dtype. Raises ValueError on other dtypes, shapes or layouts."""
    if x.dim() != 2 or weight.dim() != 2 or x.dtype not in KINDS or out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(
            "linear: expected x [N, I] and weight [O, I] of bfloat16, float16 or float32, and x's dtype or float32 as "
            f"out_dtype, but got {list(x.shape)} and {list(weight.shape)} of {x.dtype}, out_dtype {out_dtype}. "
            "Mend the arguments' shapes or dtypes."
        )
    (n, i), o, kind = x.shape, weight.shape[0], (x.dtype,)
    blocks = blocks_of(i, x.dtype)
    check("linear", x=(x, (n, i), kind), weight=(weight, (o, i), kind))
    if bias is not None:
        check("linear", bias=(bias, (o,), kind), x=(x, (n, i), kind))
        bias = aligned(bias)
    out = torch.empty((n, o), dtype=out_dtype or x.dtype, device=x.device)
    tiles = triton.cdiv(n, blocks.rows) * triton.cdiv(o, blocks.outputs)
    if tiles:
        _linear[(min(tiles, 2 * multiprocessors(x.device)),)](
            aligned(x), aligned(weight), bias, out, n, o, i,
            EVEN=i % blocks.inputs == 0, WIDEN=interpreting(), ROWS=blocks.rows, OUTPUTS=blocks.outputs,
            INPUTS=blocks.inputs, num_warps=blocks.num_warps, num_stages=blocks.num_stages,
        )  # fmt: skip
    return out


def _case(kind: torch.dtype, out: str, i: int, bias: bool = False) -> Case:
    blocks, name = blocks_of(i, kind), str(kind).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    size = "i32" if i % 16 else "i32:16"
    types = {
        "x": f"*{name}",
        "weight": f"*{name}",
        "bias": f"*{name}",
        "out": f"*{out}",
        "n": "i32",
        "o": size,
        "i": size,
    }
    cut = {"ROWS": blocks.rows, "OUTPUTS": blocks.outputs, "INPUTS": blocks.inputs}
    constants = {"EVEN": i % blocks.inputs == 0, "WIDEN": False, **cut, **({} if bias else {"bias": None})}
    signature = {key: kind for key, kind in types.items() if key not in constants}
    title = f"matmul.{name}.{i}.to_{out}{'.bias' * bias}"
    return Case(title, _linear, signature, constants, blocks.num_warps, blocks.num_stages)


AOT = [
    _case(torch.bfloat16, "bf16", 4096),
    _case(torch.bfloat16, "fp32", 4096),
    _case(torch.bfloat16, "bf16", 80, bias=True),
    _case(torch.bfloat16, "bf16", 75, bias=True),
    _case(torch.float16, "fp16", 4096),
    _case(torch.float16, "fp16", 75, bias=True),
    _case(torch.float32, "fp32", 4096),
    _case(torch.float32, "fp32", 75, bias=True),
]
