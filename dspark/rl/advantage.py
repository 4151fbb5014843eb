"""From rewards to advantages: how much better a sample is than what its group shows can be expected. Pure.

S samples in groups (the samples of one prompt). A reward that is missing (NaN) counts nowhere: its sample has advantage
0 and is not counted, and its group's mean is that of the others.

- ``grpo`` (arXiv:2402.03300): (r - mean) / (std + 1e-6) over the group, std of the population.
- ``dr_grpo`` (arXiv:2503.20783): r - mean: dividing by the spread makes much of groups that hardly differ.
- ``reinforce``: r - mean of the group's *other* samples (leave-one-out, arXiv:2402.14740), which is independent of the
  sample and so leaves the gradient unbiased.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Objective = Literal["grpo", "dr_grpo", "reinforce"]
OBJECTIVES: tuple[str, ...] = ("grpo", "dr_grpo", "reinforce")
EPS = 1e-6


def advantages(rewards: Tensor, groups: Tensor, kind: Objective) -> tuple[Tensor, Tensor]:
    """rewards [S] fp64, NaN where there is none; groups [S] int64, equal within a group -> (advantages [S] fp32,
    counted [S] bool: samples with a reward). A group of one, or of equal rewards, has advantages of 0."""
    counted = ~rewards.isnan()
    values = torch.where(counted, rewards.double(), 0.0)
    _, group = torch.unique(groups, return_inverse=True)

    def over_group(x: Tensor) -> Tensor:
        return torch.zeros(len(group), dtype=torch.float64).index_add_(0, group, x)[group]

    size = over_group(counted.double())
    centred = torch.where(counted, values - over_group(values) / size.clamp_min(1), 0.0)
    if kind == "grpo":
        spread = (over_group(centred**2) / size.clamp_min(1)).sqrt()
        centred = centred / (spread + EPS)
    elif kind == "reinforce":  # r - (sum - r) / (n - 1)
        centred = centred * size / (size - 1).clamp_min(1)
    return torch.where(size > 1, centred, 0.0).float(), counted
