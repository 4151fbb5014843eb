"""RMSNorm in Triton: values to fp64, the addition before it, slices of wider rows, rows that ignore each other."""

from __future__ import annotations

import pytest
import torch

from dspark_kernels import reference
from dspark_kernels.gpu.norm import MAX_WIDTH, add_rms_norm, rms_norm

EPS = 1e-6
KINDS = [torch.float32, torch.bfloat16]
RTOL = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # a sum of squares and five roundings; 1 ulp (interpreters truncate)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(9, 96), (33, 5, 20), (2, 577), (1, 1), (3, 4096), (40, 1, 64)])
def test_rms_norm_against_fp64(shape: tuple[int, ...], kind: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(kind), torch.randn(shape[-1]).to(kind)
    expected = reference.rms_norm(x.double(), weight.double(), EPS)
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), expected, rtol=RTOL[kind], atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(9, 96), (2, 577), (3, 2048)])
def test_the_addition_is_a_step_of_its_own(shape: tuple[int, int], kind: torch.dtype) -> None:
    """In fp32 the sum is eager torch's to the bit; in bf16 it is within 1 ulp, as the interpreter truncates."""
    x, residual, weight = torch.randn(shape).to(kind), torch.randn(shape).to(kind), torch.randn(shape[1]).to(kind)
    norm, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(norm, rms_norm(total, weight, EPS))
    torch.testing.assert_close(
        total.double(), x.double() + residual.double(), rtol=RTOL[kind] if kind != torch.float32 else 1e-7, atol=0
    )
    assert kind != torch.float32 or torch.equal(total, x + residual)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [16, 96, 577])
def test_a_row_ignores_the_others(width: int, kind: torch.dtype) -> None:
    x, residual, weight = torch.randn(32, width).to(kind), torch.randn(32, width).to(kind), torch.randn(width).to(kind)
    whole, (added, total) = rms_norm(x, weight, EPS), add_rms_norm(x, residual, weight, EPS)
    alone = [torch.tensor([n]) for n in (0, 7, 31)]
    for rows in [*alone, *(torch.arange(32)[-n:] for n in (2, 7, 8, 9)), torch.randperm(32)]:
        assert torch.equal(rms_norm(x[rows], weight, EPS), whole[rows])
        got = add_rms_norm(x[rows], residual[rows], weight, EPS)
        assert torch.equal(got[0], added[rows]) and torch.equal(got[1], total[rows])
    broken = x.clone()
    broken[::2] = float("nan")
    assert torch.equal(rms_norm(broken, weight, EPS)[1::2], whole[1::2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [1, 3])
def test_slices_of_a_wider_row(heads: int, kind: torch.dtype) -> None:
    """The q or k part of a fused projection; strides and addresses that are and are not multiples of 16 bytes."""
    weight = torch.randn(20).to(kind)
    for spare in (0, 20, 32, 33):
        row = torch.randn(7, spare + 20 * heads).to(kind)
        x = row[:, spare:].view(7, heads, 20)
        packed = rms_norm(x.contiguous(), weight, EPS)
        assert torch.equal(rms_norm(x, weight, EPS), packed)
        assert torch.equal(rms_norm(x[4:5], weight, EPS), packed[4:5])


def test_a_row_of_zeros_and_no_rows() -> None:
    weight = torch.randn(12)
    assert torch.equal(rms_norm(torch.zeros(2, 12), weight, EPS), torch.zeros(2, 12))
    assert rms_norm(torch.zeros(0, 3, 12), weight, EPS).shape == (0, 3, 12)
    assert add_rms_norm(torch.zeros(0, 12), torch.zeros(0, 12), weight, EPS)[1].shape == (0, 12)


def test_wrong_arguments() -> None:
    x, weight = torch.randn(4, 6), torch.randn(6)
    for wrong in [(x.T, weight[:4]), (x.double(), weight.double()), (x, weight[:5]), (x, weight.bfloat16())]:
        with pytest.raises(ValueError, match="rms_norm: expected"):
            rms_norm(*wrong, EPS)
    with pytest.raises(ValueError, match=f"1 to {MAX_WIDTH}"):
        rms_norm(torch.zeros(1, MAX_WIDTH + 1), torch.zeros(MAX_WIDTH + 1), EPS)
    with pytest.raises(ValueError, match="expected residual"):
        add_rms_norm(x, x[:3], weight, EPS)
    with pytest.raises(ValueError, match="add_rms_norm: expected x"):
        add_rms_norm(x[None], x[None], weight, EPS)
