"""The tokens that a truncated law (top-k, top-p, min-p) kept when it was sampled from, for later updates.

The first update after a rollout scores with the weights that sampled, so its truncation keeps the same tokens. After
that update the same top-p would keep others: a sampled token may fall outside (log-probability -inf), and the
renormalisation is another, which biases the ratio (measured by others: mean 0.896 at top-p 0.8 against 1.001 on the
kept support). So later updates hold the support fixed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dspark import ops
from dspark.contracts import SamplingParams
from dspark.runner.verify import SamplingRows


class Support(NamedTuple):
    """N rows: ids [sum of counts] int32 of the kept tokens, row after row; counts [N] int64."""

    ids: Tensor
    counts: Tensor

    @staticmethod
    def of(laws: Tensor) -> Support:
        """What laws [N, V] are more than 0 on."""
        row, column = laws.nonzero(as_tuple=True)
        return Support(column.int(), torch.bincount(row, minlength=len(laws)))

    def cut(self, logits: Tensor) -> Tensor:
        """logits [N, V] with -inf off the support; differentiable."""
        row = torch.arange(len(self.counts)).repeat_interleave(self.counts)
        kept = torch.zeros(logits.shape, dtype=torch.bool)
        kept[row, self.ids.long()] = True
        return torch.where(kept, logits, -torch.inf)


def truncates(params: SamplingParams) -> bool:
    """Whether the law keeps less than the whole vocabulary."""
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def logprob_on(support: Support, logits: Tensor, tokens: Tensor, laws: SamplingRows) -> Tensor:
    """ln of the law at its temperature over the kept tokens [N] fp32: logits [N, V], tokens [N]."""
    everything = torch.zeros_like(laws.top_k), torch.ones_like(laws.top_p), torch.zeros_like(laws.min_p)
    return ops.law_logprob(support.cut(logits), tokens, laws.temperature, *everything)
