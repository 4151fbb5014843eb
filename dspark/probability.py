"""Pure probability of speculative sampling: the references. Every function is torch, on [..., V], fp32 or fp64.

Glossary: ``target`` p and ``draft`` q are laws over one vocabulary; overlap = sum min(p, q) = 1 - TV. Nothing here is
fast; ``dspark.ops.shape_probs`` computes the same law as ``shape``.
"""

from __future__ import annotations

import torch
from torch import Tensor

RESIDUAL_FLOOR = 1e-8  # below this mass target and draft are equal up to rounding


def _keep_top_k(probs: Tensor, order: Tensor, top_k: Tensor) -> Tensor:
    rank = torch.arange(probs.shape[-1], device=probs.device)
    limit = torch.where(top_k > 0, top_k, probs.shape[-1])[..., None]
    kept = torch.zeros_like(probs, dtype=torch.bool)
    return kept.scatter(-1, order, rank < limit)


def _keep_top_p(probs: Tensor, order: Tensor, top_p: Tensor) -> Tensor:
    ranked = probs.gather(-1, order)
    before = ranked.cumsum(-1) - ranked
    enough = (before >= top_p[..., None] * ranked.sum(-1, keepdim=True)) & (top_p[..., None] < 1.0)
    enough[..., 0] = False
    kept = torch.zeros_like(probs, dtype=torch.bool)
    return kept.scatter(-1, order, ~enough)


def shape(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """logits[..., V] and one value per row -> the law a token is drawn from, [..., V], in the logits' dtype.

    softmax(logits / temperature); keep the top_k largest (0 = all); of those, renormalised, the shortest prefix of
    the largest with mass >= top_p (1 = all); of those p >= min_p * max; renormalise. Ties: the lower token id first.
    Temperature 0 gives one-hot at the lowest-id argmax.
    """
    greedy = temperature == 0
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled = scaled / torch.where(greedy, 1.0, temperature)[..., None]
    probs = scaled.softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    probs = probs * _keep_top_k(probs, order, top_k)
    probs = probs * _keep_top_p(probs, order, top_p)
    probs = probs * (probs >= min_p[..., None] * probs.amax(-1, keepdim=True))
    probs = probs / probs.sum(-1, keepdim=True)
    one_hot = torch.zeros_like(probs).scatter(-1, order[..., :1], 1.0)
    return torch.where(greedy[..., None], one_hot, probs)


def overlap(target: Tensor, draft: Tensor) -> Tensor:
    """Probability that rejection sampling accepts a draft token: sum_v min(p, q) = 1 - TV, [..., V] -> [...]."""
    return torch.minimum(target, draft).sum(-1)


def coupled_acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """Probability that both laws draw the same token from shared Gumbel noise, [..., V] -> [...].

    sum_v 1 / sum_u max(p_u / p_v, q_u / q_v) (arXiv:2408.07978). Exact in O(V log V): with tokens sorted by p/q, the
    maximum is p_u/p_v from v upwards and q_u/q_v below it, so the inner sum is two cumulative sums. Lies between
    (1 - TV) / (1 + TV) and 1 - TV. Differentiable almost everywhere.
    """
    both = (target > 0) & (draft > 0)
    ratio = torch.where(draft > 0, target / torch.where(draft > 0, draft, 1.0), torch.inf)
    order = ratio.detach().argsort(-1, descending=True)
    p, q, live = target.gather(-1, order), draft.gather(-1, order), both.gather(-1, order)
    upper = p.cumsum(-1)
    lower = q.flip(-1).cumsum(-1).flip(-1) - q
    inner = upper / torch.where(live, p, 1.0) + lower.clamp_min(0.0) / torch.where(live, q, 1.0)
    return torch.where(live, 1.0 / torch.where(live, inner, 1.0), 0.0).sum(-1)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """The law drawn from after a rejection: (p - q)+ normalised, [..., V]; p itself when that mass is <= 1e-8."""
    excess = (target - draft).clamp_min(0.0)
    mass = excess.sum(-1, keepdim=True)
    equal = mass <= RESIDUAL_FLOOR
    return torch.where(equal, target, excess / torch.where(equal, 1.0, mass))


def survival(acceptance: Tensor) -> Tensor:
    """Probability that slots 0..k are all accepted, from conditional acceptances: cumulative product, [..., K]."""
    return acceptance.cumprod(-1)
