"""The persistent matrix product in Triton: values to fp64 on ragged sizes, and rows that ignore each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark_kernels import reference
from dspark_kernels.gpu import matmul
from dspark_kernels.gpu.matmul import linear

KINDS = [torch.float32, torch.bfloat16, torch.float16]
# One rounding of the output: bf16 1 ulp (the interpreter truncates), fp16 half an ulp. The sums themselves are fp32, of
# up to 130 products of N(0, 1) values.
RTOL = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 5e-4}
ATOL = 2e-5


def inputs(n: int, o: int, i: int, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(n, i).to(kind), torch.randn(o, i).to(kind), torch.randn(o).to(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "o", "i"), [(1, 1, 1), (65, 140, 130), (7, 128, 64), (3, 129, 80), (64, 65, 75)])
def test_against_fp64(n: int, o: int, i: int, kind: torch.dtype) -> None:
    x, weight, bias = inputs(n, o, i, kind)
    wide = [t.double() for t in (x, weight, bias)]
    torch.testing.assert_close(linear(x, weight, bias).double(), reference.linear(*wide), rtol=RTOL[kind], atol=ATOL)
    unrounded = linear(x, weight, out_dtype=torch.float32)
    assert unrounded.dtype == torch.float32 and linear(x, weight).dtype == kind
    torch.testing.assert_close(unrounded.double(), reference.linear(*wide[:2]), rtol=RTOL[torch.float32], atol=ATOL)


@pytest.mark.usefixtures("_plain_dot")
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_ignores_the_others(kind: torch.dtype) -> None:
    x, weight, bias = inputs(130, 140, 100, kind)
    whole = linear(x, weight, bias)
    alone = [torch.tensor([n]) for n in (0, 64, 129)]
    for rows in [*alone, *(torch.arange(130)[-n:] for n in (2, 7, 8, 9, 32, 65)), torch.randperm(130)]:
        assert torch.equal(linear(x[rows], weight, bias), whole[rows])


@pytest.mark.usefixtures("_plain_dot")
@pytest.mark.parametrize("kind", KINDS)
def test_broken_neighbours_and_the_number_of_programs(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = inputs(70, 300, 75, kind)
    whole = linear(x, weight, bias)
    broken = x.clone()
    broken[::2] = float("nan")
    for count in (1, 2, 50):
        monkeypatch.setattr(matmul, "multiprocessors", lambda device, count=count: count)
        assert torch.equal(linear(broken, weight, bias)[1::2], whole[1::2])


@pytest.mark.usefixtures("_plain_dot")
def test_a_row_out_of_the_middle_of_a_tensor() -> None:
    x, weight, _ = inputs(4, 20, 75, torch.bfloat16)
    assert x[1:2].data_ptr() % 16
    assert torch.equal(linear(x[1:2], weight), linear(x, weight)[1:2])


def test_no_rows_and_wrong_arguments() -> None:
    x, weight, bias = inputs(4, 5, 6, torch.bfloat16)
    assert linear(x[:0], weight).shape == (0, 5)
    for wrong in [(x, weight[:, :5]), (x, weight.float()), (x[:, ::2], weight[:, ::2]), (x.double(), weight.double())]:
        with pytest.raises(ValueError, match="linear: expected"):
            linear(*wrong)
    with pytest.raises(ValueError, match="expected bias"):
        linear(x, weight, bias[:4])
    with pytest.raises(ValueError, match="out_dtype"):
        linear(x, weight, out_dtype=torch.float16)
