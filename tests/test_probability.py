"""The references of speculative sampling against brute force, and the inequalities they must satisfy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark import noise, probability

DTYPES = (torch.float32, torch.float64)


def laws(
    seed: int, v: int, zeros: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (2 * torch.randn(2, v, generator=generator, dtype=torch.float64)).softmax(-1)
    if zeros:
        p = p * (torch.rand(v, generator=generator) < 0.6)
        q = q * (torch.rand(v, generator=generator) < 0.6)
        p[0] += 0.1
        q[-1] += 0.1
    return (p / p.sum()).to(dtype), (q / q.sum()).to(dtype)


def coupled_by_definition(p: torch.Tensor, q: torch.Tensor) -> float:
    total = 0.0
    for v in range(len(p)):
        if p[v] > 0 and q[v] > 0:
            total += 1.0 / float(torch.maximum(p / p[v], q / q[v]).sum())
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 10**6), v=st.integers(1, 40), zeros=st.booleans())
def test_coupled_acceptance_by_definition(dtype: torch.dtype, seed: int, v: int, zeros: bool) -> None:
    p, q = laws(seed, v, zeros, dtype)
    got = float(probability.coupled_acceptance(p, q))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert abs(got - coupled_by_definition(p.double(), q.double())) < tolerance
    tv = 1 - float(probability.overlap(p, q))
    assert (1 - tv) / (1 + tv) - tolerance <= got <= 1 - tv + tolerance


def test_coupled_acceptance_is_how_often_shared_noise_agrees() -> None:
    p, q = laws(3, 7)
    shared = noise.gumbel(torch.tensor([5]), noise.TARGET, torch.tensor([0]), torch.arange(7 * 100000)).view(-1, 7)
    agree = ((p.log() + shared).argmax(-1) == (q.log() + shared).argmax(-1)).double().mean()
    assert abs(float(agree) - float(probability.coupled_acceptance(p, q))) < 0.006


def test_coupled_acceptance_of_equal_and_of_disjoint_laws() -> None:
    p = torch.tensor([0.5, 0.5, 0.0])
    assert float(probability.coupled_acceptance(p, p)) == 1.0
    assert float(probability.coupled_acceptance(p, torch.tensor([0.0, 0.0, 1.0]))) == 0.0


def test_coupled_acceptance_has_the_gradient_of_its_definition() -> None:
    p, q = laws(11, 6)
    q.requires_grad_()
    (got,) = torch.autograd.grad(probability.coupled_acceptance(p, q), q)
    terms = torch.stack([1 / torch.maximum(p / p[v], q / q[v]).sum() for v in range(6)])
    (expected,) = torch.autograd.grad(terms.sum(), q)
    torch.testing.assert_close(got, expected)


def test_coupled_acceptance_gradient_is_finite_with_zeros() -> None:
    p, q = laws(2, 20, zeros=True, dtype=torch.float32)
    q.requires_grad_()
    (gradient,) = torch.autograd.grad(probability.coupled_acceptance(p, q), q)
    assert gradient.isfinite().all()


def test_batched_equals_row_by_row() -> None:
    p, q = (torch.stack(rows) for rows in zip(*(laws(s, 9, True) for s in range(6)), strict=True))
    p, q = p.view(2, 3, 9), q.view(2, 3, 9)
    for call in (probability.coupled_acceptance, probability.overlap, probability.residual):
        assert torch.equal(call(p, q)[1, 2], call(p[1, 2], q[1, 2]))


@given(seed=st.integers(0, 10**6), zeros=st.booleans())
def test_rejection_sampling_restores_the_target(seed: int, zeros: bool) -> None:
    """q's mass accepted, plus the residual with what is left, is p."""
    p, q = laws(seed, 12, zeros)
    restored = torch.minimum(p, q) + (1 - probability.overlap(p, q)) * probability.residual(p, q)
    torch.testing.assert_close(restored, p)


def test_residual_of_equal_laws_is_the_target() -> None:
    p, _ = laws(1, 8, dtype=torch.float32)
    assert torch.equal(probability.residual(p, p), p)
    nearly = p * (1 + 1e-9)
    torch.testing.assert_close(probability.residual(p, nearly).sum(), torch.tensor(1.0))


def test_survival_is_a_running_product() -> None:
    got = probability.survival(torch.tensor([[0.5, 0.5, 0.0, 1.0], [1.0, 0.9, 0.8, 0.7]]))
    torch.testing.assert_close(got, torch.tensor([[0.5, 0.25, 0.0, 0.0], [1.0, 0.9, 0.72, 0.504]]))


def test_shape_by_hand() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()

    def law(t: float, k: int, top_p: float, min_p: float) -> list[float]:
        arguments = (torch.tensor(t), torch.tensor(k), torch.tensor(top_p), torch.tensor(min_p))
        return probability.shape(logits, *arguments).tolist()

    assert law(1, 0, 1, 0) == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert law(0, 0, 1, 0) == [1, 0, 0, 0]
    assert law(1, 2, 1, 0) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert law(1, 0, 0.69, 0) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert law(1, 0, 0.71, 0) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert law(1, 3, 0.75, 0) == pytest.approx([4 / 7, 3 / 7, 0, 0]), "top-p of the top-k law: 7/9 >= 0.75"
    assert law(1, 0, 1, 0.6) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert law(0.5, 0, 1, 0) == pytest.approx([16 / 30, 9 / 30, 4 / 30, 1 / 30])
