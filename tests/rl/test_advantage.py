"""Advantages against the formulas written out by hand; groups that teach nothing; rewards that are missing."""

from __future__ import annotations

import math

import pytest
import torch

from dspark.rl.advantage import OBJECTIVES, advantages

NAN = math.nan


def of(rewards: list[float], groups: list[int], kind: str) -> tuple[list[float], list[bool]]:
    gain, counted = advantages(torch.tensor(rewards).double(), torch.tensor(groups), kind)
    assert gain.dtype == torch.float32
    return gain.tolist(), counted.tolist()


def test_by_hand() -> None:
    rewards, groups = [1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7]
    assert of(rewards, groups, "dr_grpo")[0] == [0.75, -0.25, -0.25, -0.25]
    spread = math.sqrt((0.75**2 + 3 * 0.25**2) / 4)
    assert of(rewards, groups, "grpo")[0] == pytest.approx([0.75 / spread, *[-0.25 / spread] * 3], rel=1e-4)
    assert of(rewards, groups, "reinforce")[0] == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_groups_do_not_mix_whatever_their_order() -> None:
    mixed, _ = of([1.0, 10.0, 0.0, 30.0], [5, 2, 5, 2], "dr_grpo")
    assert mixed == [0.5, -10.0, -0.5, 10.0]


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_nothing_to_learn_is_zero_and_finite(kind: str) -> None:
    for rewards, groups in (([0.3, 0.3, 0.3], [0, 0, 0]), ([5.0], [0]), ([NAN, 2.0], [0, 0]), ([NAN], [0])):
        gain, counted = of(rewards, groups, kind)
        assert gain == [0.0] * len(rewards)
        assert counted == [not math.isnan(r) for r in rewards]


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_missing_reward_is_as_if_the_sample_were_not_there(kind: str) -> None:
    with_it, counted = of([1.0, NAN, 0.0, 0.5], [3, 3, 3, 3], kind)
    without, _ = of([1.0, 0.0, 0.5], [3, 3, 3], kind)
    assert [g for g, c in zip(with_it, counted, strict=True) if c] == without
    assert with_it[1] == 0.0


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_groups_advantages_add_up_to_nothing(kind: str) -> None:
    rewards = torch.randn(40, generator=torch.Generator().manual_seed(1)).double()
    gain, _ = advantages(rewards, torch.arange(40) % 5, kind)
    for group in range(5):
        assert abs(float(gain[group::5].sum())) < 1e-5


def test_the_baseline_of_reinforce_does_not_know_the_sample() -> None:
    """Another reward of a sample moves its advantage by just as much: the baseline stays."""
    low, high = of([0.0, 0.2, 0.4], [0, 0, 0], "reinforce")[0], of([9.0, 0.2, 0.4], [0, 0, 0], "reinforce")[0]
    assert high[0] - low[0] == pytest.approx(9.0)
    assert of([9.0, 0.2, 0.4], [0, 0, 0], "dr_grpo")[0][0] != pytest.approx(9.0 - 0.3)
