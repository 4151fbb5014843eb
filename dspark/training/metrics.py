"""Streaming means for validation: fixed-shape sums, so ranks without data synchronise like any other.

Left out on purpose: the calibration metrics (dspark.calibration.metrics), which the confidence module uses.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


def expected_tau(acceptance: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) of the expected accepted length, bonus token included, over blocks with at least one counted slot.

    acceptance [B,K] conditional probabilities, counted [B,K] bool: 1 + sum_k prod_{j<=k} c_j.
    """
    survival = (acceptance * counted).cumprod(dim=-1)
    blocks = counted[:, 0] if counted.shape[1] else counted.any(dim=-1)
    lengths = (1.0 + survival.sum(dim=-1)) * blocks
    return lengths.sum(), blocks.float().sum()


class MeanPer(Metric):
    """`size` means at once: update(sums [size], counts [size]), compute() [size]; NaN where nothing counted."""

    full_state_update = False

    def __init__(self, size: int = 1):
        super().__init__()
        self.sums: Tensor
        self.add_state("sums", torch.zeros(2, size, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor) -> None:
        self.sums += torch.stack([total.detach().double().reshape(-1), count.detach().double().reshape(-1)])

    def compute(self) -> Tensor:
        return self.sums[0] / self.sums[1]
