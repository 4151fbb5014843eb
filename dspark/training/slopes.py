"""Values of the vocabulary-wide losses of some slots, and the slope of their weighted sum in the logits, by formula.

With q = softmax(z / T), coefficients a per slot, G = a_l1 sign(q - p) - a_coupled dc/dq, m = sum of p inside the draft
vocabulary:

    slope = (q (G - <G, q> + a_soft m) - a_soft p) / T + a_ce (softmax(z) - onehot)

CE is taken at temperature 1. losses.py has the definitions. Shapes: n slots; logits z [n,V'], law of the same rows,
the rest [n]; fp32 or fp64. Tensors of the logits' size are reused as soon as their value is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from dspark.training.coupled import value_and_slope
from dspark.training.labels import TargetLaw

Values = dict[str, Tensor]


def values_and_slope(
    logits: Tensor, law: TargetLaw, columns: Tensor, terms: Collection[str], factors: Mapping[str, Tensor],
    temperature: float,
) -> tuple[Values, Tensor | None]:  # fmt: skip
    """{term: [n]} of `terms`, and the slope [n,V'] of sum(factor * value) over `factors` {term: a [n]}, a subset of the
    terms; None when that is empty. columns: -1 outside the draft vocabulary, where a cross entropy is 0."""
    scaled = logits if temperature == 1.0 else logits / temperature
    draft, scale = softmax(scaled)
    values, pull = _distances(draft, law, terms, factors)
    rest = torch.zeros_like(scale)  # what multiplies q beside G
    if "soft_ce" in terms:
        mass = law.inside.sum(-1)
        values["soft_ce"] = mass * scale - (law.inside * scaled).sum(-1)
        rest = rest + factors["soft_ce"] * mass if "soft_ce" in factors else rest
    slope = _slope(draft, pull, rest, law.inside, factors.get("soft_ce"), temperature) if factors else None
    if "ce" in terms:
        values["ce"] = _cross_entropy(logits, columns, factors.get("ce"), slope, (draft, scale), temperature)
    return values, slope


def softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """-> softmax, logsumexp [n]: taken from the largest probability, which is at least 1/V', not from another pass of
    exponentials."""
    draft = torch.softmax(logits, dim=-1)
    return draft, logits.amax(-1) - draft.amax(-1).log()


def _distances(
    draft: Tensor, law: TargetLaw, terms: Collection[str], factors: Mapping[str, Tensor]
) -> tuple[Values, Tensor | None]:
    """L1 and coupled, and their share of G."""
    values: Values = {}
    pulls: list[Tensor] = []
    if "l1" in terms:
        gap = draft - law.inside
        values["l1"] = gap.abs().sum(-1) + law.outside
        if "l1" in factors:
            pulls.append(gap.sign_().mul_(factors["l1"][:, None]))
    if "coupled" in terms:
        accepted, rise = value_and_slope(draft, law.inside, law.outside)
        values["coupled"] = 1.0 - accepted
        if "coupled" in factors:
            pulls.append(rise.mul_(-factors["coupled"][:, None]))
    return values, sum(pulls[1:], pulls[0]) if pulls else None


def _slope(
    draft: Tensor, pull: Tensor | None, rest: Tensor, inside: Tensor, soft: Tensor | None, temperature: float
) -> Tensor:
    """All of the slope but the cross entropy's."""
    if pull is None:
        slope = draft * rest[:, None]
    else:
        slope = pull.add_((rest - (pull * draft).sum(-1))[:, None]).mul_(draft)
    if soft is not None:
        slope.addcmul_(inside, soft[:, None], value=-1.0)
    return slope if temperature == 1.0 else slope.div_(temperature)


def _cross_entropy(
    logits: Tensor, columns: Tensor, factor: Tensor | None, slope: Tensor | None, law: tuple[Tensor, Tensor],
    temperature: float,
) -> Tensor:  # fmt: skip
    """-log softmax(logits)[columns], [n], 0 where a column is -1; its part is added to the slope. law: the draft's at
    `temperature`, which serves where that is 1."""
    draft, scale = law if temperature == 1.0 else softmax(logits)
    known, picked = columns >= 0, columns.clamp_min(0)[:, None]
    if factor is not None and slope is not None:
        factor = (factor * known)[:, None]
        slope.addcmul_(draft, factor).scatter_add_(-1, picked, -factor)
    return torch.where(known, scale - logits.gather(-1, picked)[:, 0], 0.0)
