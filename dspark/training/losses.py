"""The losses in fp32: a value per slot of the vocabulary-wide ones; (weighted sum, sum of weights) of the confidence's.

    cross entropy  -log q(label)              only where the label is in the draft vocabulary
    soft CE        -sum_v p(v) log q(v)       its gradient does not fade while q is far from p
    L1             sum_v |q(v) - p(v)|        0..2, the mass of p outside the draft vocabulary included
    coupled        1 - c(p, q)                c: the coupled verifier's acceptance (coupled.py)
    confidence     BCE(logit, label)          label soft (a probability) or an observed event, never differentiated

fp32 because the gradient of a divergence is a difference of nearly equal probabilities once the draft is good; in bf16
that difference is mostly rounding. Shapes: logits [..., V'], the rest [...]. No reduction over ranks, no logging.
Training computes the first four in chunks (fused.py); these are what it must equal. objective.py weighs and adds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.training.coupled import coupled_acceptance
from dspark.training.labels import TargetLaw

LOGIT_BOUND = 16.0  # sigmoid(16) is 1 - 1e-7: beyond it a logit says nothing more

SumCount = tuple[Tensor, Tensor]


def cross_entropies(log_draft: Tensor, columns: Tensor) -> Tensor:
    """log_draft [..., V'] log-probabilities, columns [...] int64 of the labels -> [...]; 0 where a column is -1 (not in
    the draft vocabulary)."""
    picked = log_draft.gather(-1, columns.clamp_min(0)[..., None])[..., 0]
    return -picked * (columns >= 0)


def soft_cross_entropies(log_draft: Tensor, law: TargetLaw) -> Tensor:
    """Against the target's law: [...]. Mass of the law outside the draft vocabulary is left out: no draft could lower
    it."""
    return -(law.inside * log_draft).sum(dim=-1)


def l1_distance(draft: Tensor, law: TargetLaw) -> Tensor:
    """Full L1 distance per slot [...] between draft probabilities [..., V'] and the target's law; 0..2."""
    return (draft - law.inside).abs().sum(dim=-1) + law.outside


def coupled_distance(draft: Tensor, law: TargetLaw) -> Tensor:
    """1 - acceptance by the coupled verifier per slot [...]; draft probabilities [..., V']; 0..1."""
    return 1.0 - coupled_acceptance(draft, law.inside, law.outside)


def squash(logits: Tensor) -> Tensor:
    """Identity up to LOGIT_BOUND in size, logarithmic beyond: the loss stays bounded, the gradient never vanishes."""
    size = logits.abs()
    tail = LOGIT_BOUND + torch.log1p((size - LOGIT_BOUND).clamp_min(0.0))
    return torch.where(size <= LOGIT_BOUND, logits, logits.sign() * tail)


def confidence_bce(logits: Tensor, labels: Tensor, weights: Tensor) -> SumCount:
    """Binary cross entropy of confidence logits [...] against labels [...] in [0, 1], which are detached here: (sum of
    weights * values, sum of weights)."""
    values = F.binary_cross_entropy_with_logits(squash(logits.float()), labels.detach().float(), reduction="none")
    return (values * weights).sum(), weights.sum()
