"""Sampler against trainer: the log-probabilities a rollout recorded and those of the trainer's own forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.rollouts.trajectory import Trajectory


def recorded(trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """(logprobs, raw_logprobs) [N] fp32 of all response tokens, trajectory after trajectory."""
    return (
        torch.tensor([x for t in trajectories for x in t.logprobs]),
        torch.tensor([x for t in trajectories for x in t.raw_logprobs]),
    )


def refuse_difference(trajectories: Sequence[Trajectory], logprobs: Tensor, raw: Tensor) -> None:
    """Raises DsparkError, naming the first token, unless both are what was recorded, bit for bit. To be asked before
    the weights have moved since."""
    for field, ours, theirs in zip(("logprob", "raw_logprob"), (logprobs, raw), recorded(trajectories), strict=True):
        if torch.equal(ours.detach(), theirs):
            continue
        at = int((ours.detach() != theirs).nonzero()[0])
        trajectory, position = _token(trajectories, at)
        raise DsparkError(
            f"rl: expected the trainer's log-probabilities to be the sampler's, but they differ first at trajectory "
            f"{trajectory.trajectory_id}, response token {position} (id {trajectory.response_ids[position]}), {field}: "
            f"sampled {theirs[at]:.9g}, trained {ours[at]:.9g}; at most by {spread(ours, theirs):.3g}. The weights are "
            "not those that sampled, or an operation is not invariant here (dspark doctor)."
        )


def spread(ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference; 0 for no tokens, infinity where one is no number."""
    return float((ours.detach() - theirs).abs().nan_to_num(torch.inf).max()) if len(ours) else 0.0


def _token(trajectories: Sequence[Trajectory], index: int) -> tuple[Trajectory, int]:
    for trajectory in trajectories:
        if index < len(trajectory.response_ids):
            return trajectory, index
        index -= len(trajectory.response_ids)
    raise AssertionError(f"token {index} past the last trajectory")
