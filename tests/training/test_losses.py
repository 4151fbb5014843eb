"""The losses against explicit formulas, in fp64 where precision is the point."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dspark.training import losses
from dspark.training.labels import TargetLaw, slot_weights, target_law


def some(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_losses_equal_an_explicit_weighted_mean() -> None:
    logits, target, columns = some((2, 3, 7)), some((2, 3, 7), 1), torch.tensor([[0, 1, 6], [2, 2, 5]])
    weights = slot_weights(torch.tensor([[True, True, True], [True, False, False]]), 4.0)
    law = target_law(target, None)
    distance = losses.l1_distance(torch.softmax(logits, -1), law)
    ce = losses.mean(losses.cross_entropy(torch.log_softmax(logits, -1), columns, weights))
    l1 = losses.mean(losses.weighted(distance, weights))
    ce_sum = l1_sum = weight_sum = 0.0
    for b in range(2):
        for k in range(3):
            w = float(weights[b, k])
            q, p = torch.softmax(logits[b, k].double(), -1), torch.softmax(target[b, k].double(), -1)
            ce_sum += w * float(-q[columns[b, k]].log())
            l1_sum += w * float((q - p).abs().sum())
            weight_sum += w
    assert abs(float(ce) - ce_sum / weight_sum) < 1e-5
    assert abs(float(l1) - l1_sum / weight_sum) < 1e-5


def test_soft_cross_entropy_is_the_laws_and_its_gradient_pulls_to_the_law() -> None:
    logits, target = some((2, 3, 7)).requires_grad_(), some((2, 3, 7), 1)
    law = target_law(target, torch.tensor([0, 1, 2, 3, 4, 5, 6]))
    total, count = losses.soft_cross_entropy(torch.log_softmax(logits, -1), law, torch.ones(2, 3))
    p, q = torch.softmax(target.double(), -1), torch.softmax(logits.double(), -1)
    assert abs(float(total / count) - float(-(p * q.log()).sum(-1).mean())) < 1e-5
    total.backward()
    torch.testing.assert_close(logits.grad, (q - p).float(), rtol=1e-4, atol=1e-6)


def test_every_counted_slot_gets_gradient_slot_zero_included() -> None:
    logits = some((2, 3, 7)).requires_grad_()
    counted = torch.tensor([[True, True, False], [True, False, False]])
    weights, law = slot_weights(counted, 4.0), target_law(some((2, 3, 7), 1), None)
    total, count = losses.weighted(losses.l1_distance(torch.softmax(logits, -1), law), weights)
    ce, ce_count = losses.cross_entropy(torch.log_softmax(logits, -1), torch.zeros(2, 3, dtype=torch.int64), weights)
    (total / count + ce / ce_count).backward()
    assert torch.equal(logits.grad.abs().sum(-1) > 0, counted)


def test_cross_entropy_leaves_out_labels_the_draft_cannot_say() -> None:
    log_draft = torch.log_softmax(some((1, 2, 4)), -1)
    weights = torch.ones(1, 2)
    total, count = losses.cross_entropy(log_draft, torch.tensor([[2, -1]]), weights)
    assert float(count) == 1.0
    assert torch.equal(total, -log_draft[0, 0, 2])


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


def test_l1_gradient_at_acceptance_098_equals_fp64() -> None:
    target = 2.0 * some((16, 500))
    draft = target + 0.05 * some((16, 500), 1)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        x = draft.to(dtype).requires_grad_()
        law = TargetLaw(torch.softmax(target.to(dtype), -1), torch.zeros(16, dtype=dtype), target.argmax(-1))
        distance = losses.l1_distance(torch.softmax(x, -1), law)
        assert abs(float(1 - distance.detach().mean() / 2) - 0.98) < 0.01
        gradients.append(torch.autograd.grad(distance.sum(), x)[0].double())
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 0.002


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


def test_mean_of_nothing_is_zero() -> None:
    logits = some((1, 2)).requires_grad_()
    value = losses.mean(losses.weighted(logits, torch.zeros(1, 2)))
    value.backward()
    assert float(value) == 0.0
    assert torch.equal(logits.grad, torch.zeros(1, 2))
