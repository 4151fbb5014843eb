"""What each rollout of a run showed, as figures, and the file that keeps them: history.jsonl, a line a rollout.

Figures come as sums and counts, so that ranks can add them before anything is divided. Equal runs write equal lines but
for the seconds, and but for the figures of drafting where a lookup or a schedule looks at a request's company. The
lines are part of every checkpoint, so a resumed run's file goes on from there and holds nothing twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.calibration.measures import DEFAULT_BINS, bin_index, ece_from_sums, grouped_sums
from dspark.contracts import Round
from dspark.files import atomic_write
from dspark.rl.rollout import Rollout

HISTORY = "history.jsonl"
_MEANS = ("reward", "rewards_missing", "groups_that_differ", "tokens", "stopped", "tau", "accepted")
_TABLE = (3, DEFAULT_BINS)  # events, predictions and labels by bin, of the survival


class History:
    """lines: oldest first."""

    def __init__(self, lines: Sequence[dict[str, Any]] = ()):
        self.lines = list(lines)

    def summary(self) -> str:
        """Mean reward of the first and the last rollouts, and how far sampler and trainer were apart."""
        rewards = [r for line in self.lines if (r := line.get("rollout/reward")) is not None]
        few = max(1, min(10, len(rewards) // 2))
        first, last = (sum(some) / max(1, len(some)) for some in (rewards[:few], rewards[-few:]))
        apart = max((line.get("train/logprob_diff_max") or 0.0 for line in self.lines), default=0.0)
        return (
            f"{len(self.lines)} rollouts; reward {first:.2f} -> {last:.2f} (first and last {few}); sampler and trainer "
            f"differ by {apart:g}"
        )

    def add(self, line: dict[str, Any], folder: str | Path) -> None:
        """What is no finite number becomes null."""
        bad = {k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)}
        self.lines.append({k: None if k in bad else v for k, v in line.items()})
        text = "".join(json.dumps(one, allow_nan=False) + "\n" for one in self.lines)
        atomic_write(Path(folder) / HISTORY, text)


def rollouts_told(folder: str | Path) -> int:
    """Lines of the history in a folder, 0 without one."""
    path = Path(folder) / HISTORY
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def rollout_figures(rollout: Rollout, drafts: bool, add: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Figures over the rollouts of all ranks; add sums over them. NaN where there is none.

    reward: mean of those there are; rewards_missing: share of samples without one; groups_that_differ: share of groups
    in which some reward differs, for the others teach nothing; tokens of a sample; stopped: share that ended by a stop
    token. Where something drafts: tau and accepted, tokens and accepted drafts a pass of a request's decoding, passes
    without drafts too; ece: of the draft model's survival over all slots (a lookup's rates left out).
    """
    sums = add(torch.cat([_sums(rollout).flatten(), _survival(rollout).flatten()]))
    means, table = sums[: 2 * len(_MEANS)].view(-1, 2), sums[2 * len(_MEANS) :].view(_TABLE)
    names = _MEANS if drafts else _MEANS[:-2]
    found = {name: float(total / count) for name, (total, count) in zip(names, means, strict=False)}
    return found | ({"ece": float(ece_from_sums(*table))} if drafts else {})


def _sums(rollout: Rollout) -> Tensor:
    """[len(_MEANS), 2] fp64: sum and count of each."""
    rewards, done = rollout.rewards, rollout.trajectories
    known, samples = ~rewards.isnan(), len(done)
    differ = [
        bool(len(k := rewards[(rollout.groups == g) & known]) and (k != k[0]).any()) for g in rollout.groups.unique()
    ]
    tokens = sum(len(t.response_ids) for t in done)
    passes, accepted = rollout.passes()
    rows = [
        (float(rewards[known].sum()), int(known.sum())),
        (samples - int(known.sum()), samples),
        (sum(differ), len(differ)),
        (tokens, samples),
        (sum(t.finish_reason == "stop" for t in done), samples),
        (tokens - samples, passes),  # a prompt's own pass gives a sample's first token
        (accepted, passes),
    ]
    return torch.tensor(rows, dtype=torch.float64)


def _survival(rollout: Rollout) -> Tensor:
    """_TABLE fp64, over every verified draft of the draft model."""
    rounds = [r for some in rollout.rounds.values() for r in some if r.source == "drafter"]
    said, came = survivals(rounds)
    return grouped_sums(bin_index(said), DEFAULT_BINS, said, came) if len(said) else torch.zeros(_TABLE).double()


def survivals(rounds: Sequence[Round]) -> tuple[Tensor, Tensor]:
    """(said, came) [N] fp64: the survival of every verified draft that has one, and whether the prefix was accepted."""
    said = [torch.tensor(r.confidences[: r.verified], dtype=torch.float64).cumprod(0) for r in rounds]
    came = [(torch.arange(len(s)) < r.accepted).double() for s, r in zip(said, rounds, strict=True)]
    empty = [torch.zeros(0, dtype=torch.float64)]
    return torch.cat(said + empty), torch.cat(came + empty)
