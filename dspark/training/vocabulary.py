"""Which ids the draft model predicts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dspark.contracts import DsparkError


def draft_vocabulary(counts: Tensor, size: int, always: Iterable[int]) -> Tensor:
    """The `size` most frequent ids, ascending [size] int64; ties to the lower id; `always` ids are in it in any case.

    counts [V] int64: how often each id is a response token. Raises DsparkError when `always` alone fills the size.
    """
    forced = torch.tensor(sorted(set(always)), dtype=torch.int64)
    if not len(forced) <= size <= len(counts):
        raise DsparkError(
            f"drafter.draft_vocab_size: expected between {len(forced)} and {len(counts)} (0 = all), but got {size}."
        )
    ranked = counts.clone()
    ranked[forced] = counts.max() + 1
    return torch.argsort(ranked, descending=True, stable=True)[:size].sort().values
