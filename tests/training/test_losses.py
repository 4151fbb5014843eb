"""The losses against explicit formulas, in fp64 where precision is the point."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dspark.training import losses
from dspark.training.labels import TargetLaw, slot_weights, target_law
from dspark.training.slopes import values_and_slope


def some(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slopes(logits: torch.Tensor, law: TargetLaw, columns: torch.Tensor, **factors: torch.Tensor):
    """What training computes with: {term: values [...]} and the slope [..., V'] of the weighted sum."""
    flat = TargetLaw(*(getattr(law, n).flatten(0, logits.dim() - 2) for n in TargetLaw.__slots__))
    weights = {name: factor.flatten() for name, factor in factors.items()}
    values, slope = values_and_slope(logits.flatten(0, -2), flat, columns.flatten(), weights, weights, 1.0)
    return {k: v.view(columns.shape) for k, v in values.items()}, slope.view(logits.shape)


def test_losses_equal_an_explicit_weighted_mean() -> None:
    logits, target, columns = some((2, 3, 7)), some((2, 3, 7), 1), torch.tensor([[0, 1, 6], [2, 2, 5]])
    weights = slot_weights(torch.tensor([[True, True, True], [True, False, False]]), 4.0)
    values, _ = slopes(logits, target_law(target, None), columns, ce=weights, l1=weights, soft_ce=weights)
    found = {name: float((weights * value).sum() / weights.sum()) for name, value in values.items()}
    sums, weight_sum = dict.fromkeys(found, 0.0), 0.0
    for b in range(2):
        for k in range(3):
            w = float(weights[b, k])
            q, p = torch.softmax(logits[b, k].double(), -1), torch.softmax(target[b, k].double(), -1)
            sums["ce"] += w * float(-q[columns[b, k]].log())
            sums["l1"] += w * float((q - p).abs().sum())
            sums["soft_ce"] += w * float(-(p * q.log()).sum())
            weight_sum += w
    for name, total in sums.items():
        assert abs(found[name] - total / weight_sum) < 1e-5, name


def test_the_gradient_of_soft_cross_entropy_pulls_to_the_law() -> None:
    logits, target = some((2, 3, 7)), some((2, 3, 7), 1)
    law = target_law(target, torch.tensor([0, 1, 2, 3, 4, 5, 6]))
    _, slope = slopes(logits, law, torch.zeros(2, 3, dtype=torch.int64), soft_ce=torch.ones(2, 3))
    p, q = torch.softmax(target.double(), -1), torch.softmax(logits.double(), -1)
    torch.testing.assert_close(slope, (q - p).float(), rtol=1e-4, atol=1e-6)


def test_every_counted_slot_gets_gradient_slot_zero_included() -> None:
    counted = torch.tensor([[True, True, False], [True, False, False]])
    weights, law = slot_weights(counted, 4.0), target_law(some((2, 3, 7), 1), None)
    for term in ("ce", "soft_ce", "l1", "coupled"):
        _, slope = slopes(some((2, 3, 7)), law, torch.zeros(2, 3, dtype=torch.int64), **{term: weights})
        assert torch.equal(slope.abs().sum(-1) > 0, counted), term


def test_cross_entropy_is_nothing_for_labels_the_draft_cannot_say() -> None:
    logits, columns = some((1, 2, 4)), torch.tensor([[2, -1]])
    law = target_law(some((1, 2, 4), 1), None)
    values, slope = slopes(logits, law, columns, ce=torch.ones(1, 2))
    for found in (values["ce"], losses.cross_entropies(torch.log_softmax(logits, -1), columns)):
        torch.testing.assert_close(found[0, 0], -torch.log_softmax(logits, -1)[0, 0, 2])
        assert float(found[0, 1]) == 0.0
    assert not bool(slope[0, 1].any())


def test_reduced_l1_equals_the_full_one_with_zero_draft_outside() -> None:
    ids, target, draft = torch.tensor([1, 4, 6]), some((5, 9)), some((5, 3), 1).requires_grad_()
    reduced = losses.l1_distance(torch.softmax(draft, -1), target_law(target, ids))
    (gradient,) = torch.autograd.grad(reduced.sum(), draft, retain_graph=True)
    wide = torch.full((5, 9), -torch.inf)
    wide[:, ids] = draft
    full = (torch.softmax(wide, -1) - torch.softmax(target, -1)).abs().sum(-1)
    (expected,) = torch.autograd.grad(full.sum(), draft)
    assert torch.allclose(reduced, full, atol=1e-6)
    assert torch.allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("term", ["l1", "soft_ce", "coupled"])
def test_gradients_at_acceptance_098_equal_fp64(term: str) -> None:
    """A difference of nearly equal probabilities: in fp32 as in fp64, by the formulas that training uses."""
    target = 2.0 * some((16, 500))
    draft, columns = target + 0.05 * some((16, 500), 1), torch.zeros(16, dtype=torch.int64)
    found = []
    for dtype in (torch.float32, torch.float64):
        law = TargetLaw(torch.softmax(target.to(dtype), -1), torch.zeros(16, dtype=dtype), target.argmax(-1))
        ones = torch.ones(16, dtype=dtype)
        values, slope = slopes(draft.to(dtype), law, columns, **{"l1": ones * (term == "l1"), term: ones})
        assert abs(float(1 - values["l1"].mean() / 2) - 0.98) < 0.01
        found.append(slope.double())
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 0.002


def test_law_is_detached_and_fp32() -> None:
    logits = some((2, 5)).to(torch.bfloat16).requires_grad_()
    law = target_law(logits, None)
    assert not law.inside.requires_grad
    assert law.inside.dtype == torch.float32


def test_confidence_loss_is_bounded_and_never_flat() -> None:
    logits = torch.tensor([0.3, 8.0, 3e4, -2e3, 1e9]).requires_grad_()
    total, count = losses.confidence_bce(logits, torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0]), torch.ones(5))
    total.backward()
    assert float(total / count) < 30
    assert bool((logits.grad[:4] != 0).all())
    assert bool(logits.grad.isfinite().all())


def test_confidence_loss_equals_plain_bce_in_the_normal_range() -> None:
    logits, labels = 4 * some((20,)), torch.sigmoid(some((20,), 1))
    total, count = losses.confidence_bce(logits, labels, torch.ones(20))
    assert torch.allclose(total / count, F.binary_cross_entropy_with_logits(logits, labels), atol=1e-6)


def test_confidence_label_gets_no_gradient() -> None:
    labels = torch.full((3,), 0.4, requires_grad=True)
    total, _ = losses.confidence_bce(some((3,)).requires_grad_(), labels, torch.ones(3))
    total.backward()
    assert labels.grad is None
