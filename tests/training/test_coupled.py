"""The coupled verifier's acceptance and its slope against the O(V^2) definition, finite differences and odd laws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark import probability
from dspark.training.coupled import coupled_acceptance, value_and_slope


def some(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """draft, inside, outside: laws of `rows` slots, a share of the target's mass outside."""
    generator = torch.Generator().manual_seed(seed)
    draft, target = (2 * torch.randn(2, rows, columns + 1, generator=generator, dtype=torch.float64)).softmax(-1)
    draft = draft[:, :-1] / draft[:, :-1].sum(-1, keepdim=True)
    return draft.to(dtype), target[:, :-1].to(dtype), target[:, -1].to(dtype)


def brute(draft: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """sum_v 1 / sum_u max(p_u/p_v, q_u/q_v): [..., V', V'] at once. All of p and q above 0."""
    most = torch.maximum(inside[..., None, :] / inside[..., None], draft[..., None, :] / draft[..., None])
    return (1.0 / (most.sum(-1) + outside[..., None] / inside)).sum(-1)


def slope(value: Tensor, draft: Tensor) -> Tensor:
    return torch.autograd.grad(value.sum(), draft)[0]


@pytest.mark.parametrize("columns", [1, 2, 3, 17, 60])
def test_value_and_slope_equal_brute_force(columns: int) -> None:
    draft, inside, outside = some(6, columns, columns)
    draft.requires_grad_()
    expected = brute(draft, inside, outside)
    torch.testing.assert_close(coupled_acceptance(draft, inside, outside), expected, rtol=1e-12, atol=1e-14)
    exact = slope(expected, draft)
    torch.testing.assert_close(slope(coupled_acceptance(draft, inside, outside), draft), exact, rtol=1e-10, atol=1e-12)
    single = draft.detach().float().requires_grad_()  # the sort of packed keys
    got = slope(coupled_acceptance(single, inside.float(), outside.float()), single).double()
    if columns > 1:
        assert float((got - exact).norm() / exact.norm()) < 1e-6
    else:
        assert float((got - exact).abs().max()) < 1e-6


def test_value_equals_the_reference_with_zeros_on_either_side() -> None:
    draft, inside, outside = some(40, 30, 3)
    keep = torch.rand(2, 40, 30, generator=torch.Generator().manual_seed(4)) < 0.5
    draft, inside = draft * keep[0], inside * keep[1]
    wide = torch.cat([inside, outside[:, None]], -1), torch.cat([draft, torch.zeros(40, 1)], -1)
    expected = probability.coupled_acceptance(*wide)
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        value, rise = value_and_slope(draft.to(dtype), inside.to(dtype), outside.to(dtype))
        torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)
        assert bool(rise.isfinite().all())


def test_gradcheck_through_the_softmax() -> None:
    _, inside, outside = some(3, 7)
    logits = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: coupled_acceptance(z.softmax(-1), inside, outside), logits)


def test_slope_equals_finite_differences_where_a_law_is_zero() -> None:
    """p = 0 in columns 0 and 1, q = 0 in columns 1 and 2; there the difference is taken to the right."""
    draft = torch.tensor([[0.4, 0.0, 0.0, 0.25, 0.35]], dtype=torch.float64)
    inside = torch.tensor([[0.0, 0.0, 0.3, 0.3, 0.2]], dtype=torch.float64)
    outside = torch.tensor([0.2], dtype=torch.float64)
    value, rise = value_and_slope(draft, inside, outside)
    for column in range(5):
        moved = draft.clone()
        moved[0, column] += 1e-7
        difference = (value_and_slope(moved, inside, outside)[0] - value) / 1e-7
        assert abs(float(difference - rise[0, column])) < 1e-5, column


def test_equal_laws_and_ties() -> None:
    """c = 1 at p = q, which is its maximum. Where all ratios are tied the slope is one-sided but bounded."""
    draft, _, _ = some(4, 9)
    for dtype in (torch.float64, torch.float32):
        q = draft.to(dtype)
        value, rise = value_and_slope(q, q, torch.zeros(4, dtype=dtype))
        torch.testing.assert_close(value, torch.ones(4, dtype=dtype), rtol=1e-6, atol=1e-6)
        assert float(rise.abs().max()) <= 1.0 + 1e-5
    p = torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64)
    q = torch.tensor([[0.3, 0.3, 0.4]], dtype=torch.float64)  # columns 0 and 1 tied
    value, rise = value_and_slope(q, p, torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(value, brute(q, p, torch.zeros(1)))
    right, left = (brute(q + d * torch.tensor([1.0, 0.0, 0.0]), p, torch.zeros(1)) for d in (1e-7, -1e-7))
    sides = sorted(float(x) for x in ((right - value) / 1e-7, (value - left) / 1e-7))
    assert sides[0] - 1e-5 <= min(rise[0, 0], rise[0, 1]) <= max(rise[0, 0], rise[0, 1]) <= sides[1] + 1e-5


def test_disjoint_laws_never_agree() -> None:
    p, q = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.0, 0.5]])
    assert value_and_slope(q, p, torch.zeros(1))[0].tolist() == [0.0]


def test_tiny_probabilities_do_not_overflow() -> None:
    logits = torch.linspace(-95.0, 0.0, 64)
    draft, inside = logits.softmax(-1)[None], logits.flip(0).softmax(-1)[None]
    value, rise = value_and_slope(draft, inside, torch.zeros(1))
    assert bool(rise.isfinite().all())
    wide = value_and_slope(draft.double(), inside.double(), torch.zeros(1).double())[0]
    torch.testing.assert_close(value.double(), wide, rtol=1e-5, atol=1e-12)


def test_gradient_at_acceptance_098_equals_fp64() -> None:
    generator = torch.Generator().manual_seed(0)
    target = 2.0 * torch.randn(16, 500, generator=generator)
    draft = target + 0.05 * torch.randn(16, 500, generator=generator)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        x = draft.to(dtype).requires_grad_()
        value = coupled_acceptance(x.softmax(-1), target.to(dtype).softmax(-1), torch.zeros(16, dtype=dtype))
        assert 0.95 < float(value.detach().mean()) < 0.99
        gradients.append(slope(value, x).double())
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 0.002
