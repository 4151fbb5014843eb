"""What each rollout of a run showed, as figures, and the file that keeps them: history.jsonl, a line a rollout.

Seconds apart, equal runs write equal lines. The lines are part of every checkpoint, so a resumed run's file goes on
from there and holds nothing twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.calibration.measures import bin_index, ece
from dspark.contracts import Round
from dspark.files import atomic_write
from dspark.rl.rollout import Rollout

HISTORY = "history.jsonl"


class History:
    """lines: oldest first."""

    def __init__(self, lines: Sequence[dict[str, Any]] = ()):
        self.lines = list(lines)

    def add(self, line: dict[str, Any], folder: str | Path) -> None:
        self.lines.append({k: None if isinstance(v, float) and math.isnan(v) else v for k, v in line.items()})
        atomic_write(Path(folder) / HISTORY, "".join(json.dumps(one) + "\n" for one in self.lines))


def rollout_figures(rollout: Rollout, slots: int) -> dict[str, float]:
    """Figures of one rollout, NaN where there is none: reward (mean and spread over samples), share of samples without
    one, share of groups whose rewards differ, tokens a sample, share ended by a stop; with drafts (slots > 0) tau,
    accepted drafts a round, and the ECE of the survival over all slots."""
    rewards, groups, count = rollout.rewards, rollout.groups, max(1, len(rollout.trajectories))
    known = rewards[~rewards.isnan()]
    figures = {
        "reward": float(known.mean()) if len(known) else math.nan,
        "rewards_missing": (len(rewards) - len(known)) / count,
        "reward_std": float(known.std(correction=0)) if len(known) else math.nan,
        "groups_that_differ": _differing(rewards, groups),
        "tokens": sum(len(t.response_ids) for t in rollout.trajectories) / count,
        "stopped": sum(t.finish_reason == "stop" for t in rollout.trajectories) / count,
    }
    if slots:
        found = rollout.acceptance(slots)
        rounds = [r for some in rollout.rounds.values() for r in some]
        figures |= {"tau": found.tau, "accepted": found.accepted, "ece": survival_ece(rounds)}
    return figures


def survival_ece(rounds: Sequence[Round]) -> float:
    """ECE of the survival of every verified draft, over all slots together; NaN without confidences."""
    said, came = [], []
    for r in rounds:
        survival = torch.tensor(r.confidences[: r.verified], dtype=torch.float64).cumprod(0)
        said.append(survival)
        came.append((torch.arange(len(survival)) < r.accepted).double())
    if not any(len(s) for s in said):
        return math.nan
    probabilities, labels = torch.cat(said), torch.cat(came)
    found = ece(probabilities, labels, bin_index(probabilities))
    return math.nan if found is None else found


def _differing(rewards: Tensor, groups: Tensor) -> float:
    """Share of the groups in which some reward differs from another: the others teach nothing."""
    kinds = [rewards[(groups == g) & ~rewards.isnan()] for g in groups.unique()]
    return sum(bool(len(k) and (k != k[0]).any()) for k in kinds) / max(1, len(kinds))
