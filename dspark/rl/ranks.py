"""What an RL step needs of the other processes: sums, and the largest of some counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """world: processes; strategy: the trainer's, not looked at when there is one."""

    world: int = 1
    strategy: Any = None

    def add(self, values: Tensor) -> Tensor:
        """The sum over all ranks, detached."""
        values = values.detach()
        return values if self.world == 1 else self.strategy.reduce(values.clone(), reduce_op="sum")

    def largest(self, value: float) -> float:
        """The largest of all ranks' numbers."""
        return value if self.world == 1 else float(self.strategy.reduce(torch.tensor(value), reduce_op="max"))
