"""Confidences in Triton: values to fp64, saturation, and rows that ignore each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark_kernels.gpu.confidence import confidence, confidence_reference

TEMPERATURES = torch.tensor([1.0, 0.5, 2.0, 1.7])


def inputs(n: int, width: int, rank: int, kind: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """hidden, embedding, weight, bias, slot."""
    hidden, embedding = torch.randn(n, width).to(kind), torch.randn(n, rank).to(kind) if rank else None
    weight = (torch.randn(width + rank) / width**0.5).to(kind)
    return hidden, embedding, weight, torch.tensor([0.3]).to(kind), torch.arange(n) % 4


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "rank"), [(37, 0), (1, 1), (1024, 16), (1500, 260), (64, 1030)])
def test_against_fp64(width: int, rank: int, kind: torch.dtype) -> None:
    """fp32 chains of 2 terms and a tree: the logit is within 2e-6 of the truth, a sigmoid's slope is at most 1 / 4,
    and a temperature of 0.5 doubles it."""
    hidden, embedding, weight, bias, slot = inputs(9, width, rank, kind)
    got = confidence(hidden, embedding, weight, bias, TEMPERATURES, slot)
    truth = confidence_reference(hidden, embedding, weight, bias, TEMPERATURES, slot)
    torch.testing.assert_close(got, truth, rtol=0, atol=2e-6)
    assert got.dtype == torch.float32


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_row_ignores_the_others(kind: torch.dtype) -> None:
    hidden, embedding, weight, bias, slot = inputs(32, 1111, 33, kind)
    assert embedding is not None
    whole = confidence(hidden, embedding, weight, bias, TEMPERATURES, slot)
    alone = [torch.tensor([n]) for n in (0, 7, 31)]
    for rows in [*alone, *(torch.arange(32)[-n:] for n in (2, 7, 8, 9)), torch.randperm(32)]:
        assert torch.equal(
            confidence(hidden[rows], embedding[rows], weight, bias, TEMPERATURES, slot[rows]), whole[rows]
        )


def test_a_row_out_of_the_middle_of_a_tensor() -> None:
    """Its address is not a multiple of 16 bytes, which must not choose another kernel."""
    hidden, _, weight, bias, slot = inputs(4, 37, 0, torch.float32)
    whole = confidence(hidden, None, weight, bias, TEMPERATURES, slot)
    assert hidden[1:2].data_ptr() % 16
    assert torch.equal(confidence(hidden[1:2], None, weight, bias, TEMPERATURES, slot[1:2]), whole[1:2])


def test_both_ends() -> None:
    hidden, bias = torch.tensor([[0.0], [300.0], [-300.0], [1e4]]), torch.zeros(1)
    got = confidence(hidden, None, torch.ones(1), bias, TEMPERATURES, torch.zeros(4, dtype=torch.int64))
    assert got.tolist() == [0.5, 1.0, 0.0, 1.0]


def test_a_slot_without_a_temperature_is_not_a_number() -> None:
    hidden, _, weight, bias, _ = inputs(3, 8, 0, torch.float32)
    got = confidence(hidden, None, weight, bias, TEMPERATURES, torch.tensor([4, -1, 3]))
    assert got.isnan().tolist() == [True, True, False]


def test_no_rows_and_wrong_arguments() -> None:
    hidden, _, weight, bias, slot = inputs(3, 8, 0, torch.float32)
    assert confidence(hidden[:0], None, weight, bias, TEMPERATURES, slot[:0]).shape == (0,)
    with pytest.raises(ValueError, match=r"weight \[10\] of float32, but got \[8\]"):
        confidence(hidden, torch.zeros(3, 2), weight, bias, TEMPERATURES, slot)
    with pytest.raises(ValueError, match=r"embedding \[3, 2\] of float32"):
        confidence(hidden, torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(10), bias, TEMPERATURES, slot)
