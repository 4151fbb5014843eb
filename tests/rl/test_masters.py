"""bf16 weights learn through fp32 masters what bf16 steps would lose; fp32 weights are their own."""

from __future__ import annotations

import torch
from torch import nn

from dspark.rl.masters import Masters


def one(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=dtype))


def test_small_steps_add_up_that_bf16_would_round_away() -> None:
    weight, plain = one(torch.bfloat16), one(torch.bfloat16)
    masters = Masters([("w", weight)])
    ours, theirs = torch.optim.SGD(masters.tensors, lr=1e-4), torch.optim.SGD([plain], lr=1e-4)
    for _ in range(100):
        weight.grad, plain.grad = torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)
        masters.take()
        ours.step(), theirs.step()
        masters.give()
    assert torch.equal(plain.detach(), one(torch.bfloat16).detach()), "the plain steps were to be lost"
    assert torch.equal(weight.detach(), (one(torch.float32) - 0.01).detach().bfloat16())
    assert weight.grad is None


def test_gradients_of_several_passes_are_added_in_fp32() -> None:
    weight = one(torch.bfloat16)
    masters = Masters([("w", weight)])
    for value in (256.0, 1.0, 1.0):  # in bf16 256 + 1 is 256
        weight.grad = torch.full((3,), value, dtype=torch.bfloat16)
        masters.take()
    assert masters.tensors[0].grad.tolist() == [258.0] * 3


def test_fp32_weights_are_their_own_masters() -> None:
    weight = one(torch.float32)
    masters = Masters([("w", weight)])
    assert masters.tensors[0] is weight
    assert masters.state_dict() == {}
    weight.grad = torch.ones(3)
    masters.take()
    assert weight.grad.tolist() == [1.0] * 3
    masters.give()
    assert weight.grad is None


def test_state_goes_into_masters_and_weights() -> None:
    first = Masters([("w", one(torch.bfloat16))])
    with torch.no_grad():
        first.tensors[0].add_(1e-4)
    weight = one(torch.bfloat16)
    second = Masters([("w", weight)])
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    assert torch.equal(second.tensors[0], first.tensors[0])
    assert torch.equal(weight.detach(), first.tensors[0].detach().bfloat16())
