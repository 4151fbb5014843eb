"""The loss against a loop over tokens; its gradient where nothing has moved; the clip on the side that it is for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dspark.rl.advantage import OBJECTIVES
from dspark.rl.objective import Tokens, clipped, kl_to_reference, surrogate

LENGTHS = torch.tensor([3, 1, 4])


def tokens(recorded: Tensor, counted: tuple[bool, ...] = (True, True, True)) -> Tokens:
    sample = torch.arange(3).repeat_interleave(LENGTHS)
    return Tokens(sample, torch.tensor([0.5, -1.0, 2.0]), torch.tensor(counted), LENGTHS, 6, recorded)


def drawn(seed: int) -> Tensor:
    return -torch.rand(8, generator=torch.Generator().manual_seed(seed)) * 3


def by_hand(logprobs: Tensor, given: Tokens, kind: str, low: float, high: float) -> float:
    total, at = 0.0, 0
    for i, length in enumerate(LENGTHS.tolist()):
        for _ in range(length):
            ratio, gain = math.exp(float(logprobs[at] - given.recorded[at])), float(given.advantage[i])
            term = ratio * gain
            if kind != "reinforce":
                term = min(term, max(1 - low, min(1 + high, ratio)) * gain)
            total -= (term / (length if kind == "grpo" else given.most)) * bool(given.counted[i])
            at += 1
    return total


@pytest.mark.parametrize("counted", [(True, True, True), (True, False, True)])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_against_a_loop(kind: str, counted: tuple[bool, ...]) -> None:
    given, logprobs = tokens(drawn(1), counted), drawn(2)
    total, count = surrogate(logprobs, given, kind, 0.2, 0.3)
    assert float(total) == pytest.approx(by_hand(logprobs, given, kind, 0.2, 0.3), rel=1e-5)
    assert float(count) == sum(counted)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_where_nothing_moved_the_gradient_is_the_advantage(kind: str) -> None:
    logprobs = drawn(1).requires_grad_()
    given = tokens(drawn(1))
    surrogate(logprobs, given, kind, 0.2, 0.2)[0].backward()
    per_token = LENGTHS if kind == "grpo" else torch.full_like(LENGTHS, 6)
    assert torch.equal(logprobs.grad, -((1 / per_token)[given.sample] * given.advantage[given.sample]))
    assert float(clipped(logprobs, given, kind, 0.0, 0.0)[0]) == 0


@pytest.mark.parametrize("gain", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 2.0])
def test_the_clip_stops_what_went_far_enough_and_nothing_else(ratio: float, gain: float) -> None:
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    one = torch.tensor([1])
    given = Tokens(
        torch.zeros(1, dtype=torch.int64), torch.tensor([gain]), torch.tensor([True]), one, 1, torch.zeros(1)
    )
    surrogate(logprobs, given, "grpo", 0.2, 0.2)[0].backward()
    stopped = (gain > 0 and ratio > 1.2) or (gain < 0 and ratio < 0.8)
    assert (float(logprobs.grad) == 0.0) == stopped
    assert clipped(logprobs, given, "grpo", 0.2, 0.2)[0] == stopped
    assert clipped(logprobs, given, "reinforce", 0.2, 0.2)[0] == 0


def test_kl_is_zero_at_the_reference_positive_elsewhere_and_right_on_average() -> None:
    given = tokens(drawn(1))
    assert float(kl_to_reference(drawn(3), drawn(3), given, "grpo")[0]) == 0.0
    assert float(kl_to_reference(drawn(3), drawn(4), given, "grpo")[0]) > 0.0
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    drawn_ids = torch.multinomial(p, 200_000, replacement=True, generator=torch.Generator().manual_seed(7))
    many = torch.tensor([len(drawn_ids)])
    flat = Tokens(torch.zeros(len(drawn_ids), dtype=torch.int64), torch.zeros(1), torch.tensor([True]), many, 1, p)
    estimate, _ = kl_to_reference(p.log()[drawn_ids], q.log()[drawn_ids], flat, "grpo")
    assert float(estimate) == pytest.approx(float((p * (p / q).log()).sum()), abs=0.01)  # 200,000 draws: sd under 0.002


def test_no_counted_sample_gives_zero_not_nan() -> None:
    total, count = surrogate(drawn(2), tokens(drawn(1), (False, False, False)), "grpo", 0.2, 0.2)
    assert float(total) == 0.0
    assert float(count) == 0.0
