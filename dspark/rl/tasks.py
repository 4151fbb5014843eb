"""Rewards of the two tasks that ship (data/rl), as `rollout.reward` names them: dspark.rl.tasks:same_digits."""

from __future__ import annotations

import re

from dspark.rollouts.rewards import RewardInput


def same_digits(sample: RewardInput) -> float:
    """Share of the places where the answer is what it should be: the digits that were asked, then the end."""
    asked = sample.messages[-1]["content"]
    wanted, got = [*asked, "end"], [*sample.text]
    if sample.finish_reason == "stop":
        got.append("end")
    return sum(a == b for a, b in zip(wanted, got, strict=False)) / len(wanted)


def right_sum(sample: RewardInput) -> float:
    """1 when the answer comes to its end in time and the last number in it is the sum that was asked; 0 otherwise."""
    a, b = map(int, re.findall(r"\d+", sample.messages[-1]["content"]))
    said = re.findall(r"\d+", sample.text)
    return float(sample.finish_reason == "stop" and said[-1:] == [str(a + b)])
