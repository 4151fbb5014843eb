"""What an RL step needs of the other processes: sums, and the largest of some counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dspark.contracts import DsparkError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """world: processes; strategy: the trainer's, not looked at when there is one."""

    world: int = 1
    strategy: Any = None

    def add(self, values: Tensor) -> Tensor:
        """The sum over all ranks, detached."""
        values = values.detach()
        return values if self.world == 1 else self.strategy.reduce(values.clone(), reduce_op="sum")

    def together(self, work: Callable[[], T]) -> T:
        """work(), which does not look at other ranks. Raises DsparkError on every rank where it did on one: who went on
        alone would wait for the others."""
        done: list[T] = []
        error: DsparkError | None = None
        try:
            done.append(work())
        except DsparkError as raised:
            error = raised
        failed = self.largest(float(error is not None))
        if error is not None:
            raise error
        if failed:
            raise DsparkError("rl: expected all processes to go on, but another one stopped. It says why itself.")
        return done[0]

    def largest(self, value: float) -> float:
        """The largest of all ranks' numbers."""
        return value if self.world == 1 else float(self.strategy.reduce(torch.tensor(value), reduce_op="max"))
