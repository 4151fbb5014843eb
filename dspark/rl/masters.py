"""fp32 copies of bf16 weights for an optimizer to step on: an update of 1e-6 is less than half of a bf16 weight's last
bit, and would be rounded away every time. Weights that are fp32 are their own masters.

Gradients are added up in fp32 too: a step's micro-batches each leave a bf16 gradient, which ``take`` adds here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


class Masters:
    """named: the weights, in an order that stays (the optimizer numbers its moments by it)."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]):
        self._weights = dict(named)
        self._masters = {name: _master(weight) for name, weight in self._weights.items()}

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer steps on, by name."""
        return iter(self._masters.items())

    @property
    def tensors(self) -> list[nn.Parameter]:
        return list(self._masters.values())

    def take(self) -> None:
        """Adds the weights' gradients to the masters' and clears them."""
        for name, weight in self._weights.items():
            master = self._masters[name]
            if master is weight or weight.grad is None:
                continue
            gradient = weight.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            weight.grad = None

    @torch.no_grad()
    def give(self) -> None:
        """Rounds the masters into the weights, in place, and clears the gradients."""
        for name, weight in self._weights.items():
            master = self._masters[name]
            if master is not weight:
                weight.copy_(master)
            master.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """The masters that are not the weights themselves."""
        return {n: m.detach() for n, m in self._masters.items() if m is not self._weights[n]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Into masters and weights."""
        assert state.keys() == self.state_dict().keys(), "masters of other weights"
        for name, tensor in state.items():
            self._masters[name].copy_(tensor)
        self.give()


def _master(weight: nn.Parameter) -> nn.Parameter:
    return weight if weight.dtype == torch.float32 else nn.Parameter(weight.detach().float())
