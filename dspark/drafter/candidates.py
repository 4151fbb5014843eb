"""The candidate selector: a slot's draft law lives on the `count` tokens its base logits like best (DFlash 2, z-lab
2026).

The support is chosen before the sequential bias, which then reorders inside it. Every other logit is -inf, so the law
a token is drawn from, and the law the verifier is handed, are both exactly 0 there. Which logits stay is decided by
comparisons alone: a function of the row, equal values settled by the column.
Left out on purpose: an index list in place of -inf (a sampler of its own for a few columns).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def keep_candidates(logits: Tensor, count: int) -> Tensor:
    """logits [..., Vd] -> the same with all but the `count` largest at -inf; among equal ones the lowest columns stay.
    count 0 keeps all. A NaN stays where it is, for the sampling operations to refuse."""
    if count == 0:
        return logits
    least = logits.topk(count, dim=-1).values[..., -1:]
    above, tied = logits > least, logits == least
    room = count - above.sum(dim=-1, keepdim=True)
    late = tied & (tied.cumsum(dim=-1, dtype=torch.int32) > room)
    return logits.masked_fill((logits < least) | late, -math.inf)
