"""The acceptance rate in Triton: value and gradient to fp64, ties, broken rows, and rows that ignore each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark_kernels.gpu.acceptance import acceptance, acceptance_reference

KINDS = [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]  # fmt: skip


def pair(n: int, v: int, target: torch.dtype, draft: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of two laws that overlap by about a half."""
    shared = 2 * torch.randn(n, v)
    return (shared + torch.randn(n, v)).to(target), (shared + torch.randn(n, v)).to(draft)


def gradient(rate: Tensor, logits: Tensor, outer: Tensor) -> Tensor:
    return torch.autograd.grad(rate, logits, outer)[0]


@pytest.mark.parametrize(("target", "draft"), KINDS)
@pytest.mark.parametrize("v", [1, 5, 2048, 2049, 5000])
def test_value_and_gradient_against_fp64(v: int, target: torch.dtype, draft: torch.dtype) -> None:
    """A probability is an fp32 exponential times an fp32 scale: 2e-6 relative, with sums of up to 5000 terms. A slope
    has a difference of two such sums in it; in bf16 it is rounded once more: 8e-3, 1 ulp (interpreters truncate)."""
    p, q = pair(7, v, target, draft)
    q.requires_grad_()
    outer = torch.randn(7)
    got, truth = acceptance(p, q), acceptance_reference(p, q)
    torch.testing.assert_close(got, truth, rtol=2e-6, atol=0)
    wide = q.detach().double().requires_grad_()
    expected = gradient(acceptance_reference(p, wide), wide, outer)
    slope = gradient(got, q, outer)
    assert slope.dtype == draft
    rtol = 2e-5 if draft == torch.float32 else 8e-3
    torch.testing.assert_close(slope.double(), expected, rtol=rtol, atol=1e-8)


def test_a_row_ignores_the_others() -> None:
    p, q = pair(32, 301, torch.float32, torch.bfloat16)
    q.requires_grad_()
    whole = acceptance(p, q)
    slope = gradient(whole, q, torch.ones(32))
    for rows in [
        *(torch.tensor([n]) for n in (0, 7, 31)),
        *(torch.arange(32)[-n:] for n in (2, 7, 8, 9)),
        torch.randperm(32),
    ]:
        some = q.detach()[rows].requires_grad_()
        rate = acceptance(p[rows], some)
        assert torch.equal(rate, whole[rows])
        assert torch.equal(gradient(rate, some, torch.ones(len(rows))), slope[rows])


def test_equal_laws() -> None:
    """Every token is a tie: the rate is 1 and its gradient exactly 0."""
    p = 3 * torch.randn(3, 2500)
    q = p.clone().requires_grad_()
    rate = acceptance(p, q)
    torch.testing.assert_close(rate, torch.ones(3), rtol=1e-6, atol=0)
    assert torch.equal(gradient(rate, q, torch.ones(3)), torch.zeros(3, 2500))


def test_a_tie_does_not_count_as_below() -> None:
    """p = (a, b, c), q = (b, a, c) with a > b: s = (1, 0, 0), so the gradient is q (s - q_0)."""
    p, q = torch.tensor([[1.0, 0.0, 0.5]]), torch.tensor([[0.0, 1.0, 0.5]], requires_grad=True)
    law = q.detach().double().softmax(-1)[0]
    slope = gradient(acceptance(p, q), q, torch.ones(1))
    expected = law * (torch.tensor([1.0, 0.0, 0.0]) - law[0])
    torch.testing.assert_close(slope[0].double(), expected, rtol=1e-6, atol=0)


def test_laws_without_some_tokens() -> None:
    """-inf logits. Disjoint laws overlap by 0, laws of one token by 1 or 0; q = (1/2, 0, 1/2, 0) covers a third of
    p = (1/3, 1/3, 0, 1/3), and nowhere lies below it where it could give. No slope, nowhere."""
    none = -torch.inf
    p = torch.tensor([[0.0, 1.0, none, none], [none, 5.0, none, none], [none, 5.0, none, none], [0.0, 0.0, none, 0.0]])
    q = torch.tensor(
        [[none, none, 2.0, 0.0], [none, -3.0, none, none], [0.0, none, none, none], [0.0, none, 0.0, none]]
    )
    q.requires_grad_()
    rate = acceptance(p, q)
    torch.testing.assert_close(rate, torch.tensor([0.0, 1.0, 0.0, 1 / 3]), rtol=1e-6, atol=0)
    assert torch.equal(gradient(rate, q, torch.ones(4)), torch.zeros(4, 4))


def test_broken_rows_give_nan() -> None:
    p, q = torch.randn(5, 3000), torch.randn(5, 3000)
    p[0, 2999] = q[1, 0] = torch.nan
    p[2] = -torch.inf
    q[3, 5] = torch.inf
    assert acceptance(p, q).isnan().tolist() == [True, True, True, True, False]


def test_the_target_is_a_constant() -> None:
    p, q = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    with pytest.raises(ValueError, match="Detach it"):
        acceptance(p, q)
    with torch.no_grad():
        assert not acceptance(p, q).requires_grad
    assert acceptance(p.detach(), q).requires_grad


def test_no_rows_and_wrong_arguments() -> None:
    empty = torch.empty(0, 4, requires_grad=True)
    rate = acceptance(torch.empty(0, 4), empty)
    assert rate.shape == (0,)
    assert gradient(rate, empty, torch.ones(0)).shape == (0, 4)
    with pytest.raises(ValueError, match=r"target_logits \[2, 4\]"):
        acceptance(torch.zeros(2, 5), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="at least one column"):
        acceptance(torch.zeros(2, 0), torch.zeros(2, 0))


def test_a_second_derivative_is_refused() -> None:
    target, draft = torch.randn(2, 40), torch.randn(2, 40).requires_grad_()
    with pytest.raises(ValueError, match="create_graph"):
        torch.autograd.grad(acceptance(target, draft).sum(), draft, create_graph=True)
