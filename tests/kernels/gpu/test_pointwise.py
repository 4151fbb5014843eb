"""Rotary embedding and the gated activation in Triton: values, saturation, slices, rows that ignore each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark_kernels import reference
from dspark_kernels.gpu.pointwise import rotary, silu_mul

KINDS = [torch.float32, torch.bfloat16]
RTOL = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # a few roundings; 1 ulp (the interpreter truncates)
SOME = [*(torch.tensor([n]) for n in (0, 7, 31)), *(torch.arange(32)[-n:] for n in (2, 7, 8, 9))]


def turn(n: int, half: int) -> tuple[Tensor, Tensor]:
    angle = 100 * torch.rand(n, half)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize(("heads", "d"), [(1, 2), (9, 64), (3, 20), (17, 96)])
def test_rotary(heads: int, d: int) -> None:
    """fp32: eager torch to the bit. bf16: the fp64 truth, rounded once; cancellation leaves an error of the operands'
    fp32 size."""
    x, (cos, sin) = torch.randn(5, heads, d), turn(5, d // 2)
    a, b = x.chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    assert torch.equal(rotary(x, cos, sin), torch.cat((a * c - b * s, b * c + a * s), -1))
    half = x.bfloat16()
    expected = reference.rotary(half.double(), cos.double(), sin.double())
    torch.testing.assert_close(rotary(half, cos, sin).double(), expected, rtol=RTOL[torch.bfloat16], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rotary_of_slices_and_of_rows_apart(kind: torch.dtype) -> None:
    row, (cos, sin) = torch.randn(32, 5 * 20 + 3).to(kind), turn(32, 10)
    x = row[:, 3 : 3 + 2 * 20].view(32, 2, 20)
    whole = rotary(x.contiguous(), cos, sin)
    assert torch.equal(rotary(x, cos, sin), whole)
    for rows in [*SOME, torch.randperm(32)]:
        assert torch.equal(rotary(x[rows], cos[rows], sin[rows]), whole[rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 75, 1030])
def test_silu_mul(width: int, kind: torch.dtype) -> None:
    gate_up = torch.cat((3 * torch.randn(32, width), torch.randn(32, width)), 1).to(kind)
    whole, expected = silu_mul(gate_up), reference.silu_mul(gate_up.double())
    torch.testing.assert_close(whole.double(), expected, rtol=RTOL[kind], atol=0)
    broken = gate_up.clone()
    broken[::2] = float("nan")
    assert torch.equal(silu_mul(broken)[1::2], whole[1::2])
    for rows in [*SOME, torch.randperm(32)]:
        assert torch.equal(silu_mul(gate_up[rows]), whole[rows])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_saturated_gates(kind: torch.dtype) -> None:
    """Large gates pass (1 / (1 + exp(-gate)) is 1), very negative ones give 0 (the truth is below 1e-35), never NaN."""
    gate = torch.tensor([[0.0, 100.0, 1e30, -100.0, -1e30]])
    got = silu_mul(torch.cat((gate, torch.ones(1, 5)), 1).to(kind))
    assert torch.equal(got[0, :3], gate[0, :3].to(kind)) or kind == torch.bfloat16  # 1e30 is truncated there
    assert torch.equal(got[0, 3:], torch.zeros(2, dtype=kind))


def test_no_rows_and_wrong_arguments() -> None:
    x, (cos, sin) = torch.randn(4, 2, 6), turn(4, 3)
    assert rotary(x[:0], cos[:0], sin[:0]).shape == (0, 2, 6)
    assert silu_mul(torch.zeros(0, 6)).shape == (0, 3)
    for wrong in [(x[..., :5], cos, sin), (x, cos[:3], sin[:3]), (x, cos.double(), sin), (x[0], cos[0], sin[0])]:
        with pytest.raises(ValueError, match="rotary: expected"):
            rotary(*wrong)
    for gate_up in (torch.zeros(2, 5), torch.zeros(2, 6).double(), torch.zeros(6, 2).T):
        with pytest.raises(ValueError, match="silu_mul: expected"):
            silu_mul(gate_up)
