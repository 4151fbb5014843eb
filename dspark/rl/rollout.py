"""One rollout of an RL run: prompts in, a trajectory folder out, read back as what the updates learn from.

A rollout is an ordinary folder of dspark.rollouts (journal, hashed shards, manifest), named by its number. So a run
that is killed and resumed finds what it had finished, and a folder that other weights wrote is refused, by their hash.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.contracts import Completion, DsparkError, Request, Round
from dspark.corpus.prompts import Prompt
from dspark.rollouts.collect import Generator, collect
from dspark.rollouts.config import RolloutConfig
from dspark.rollouts.rewards import Reward
from dspark.rollouts.store import read_rounds, read_trajectories
from dspark.rollouts.trajectory import Trajectory
from dspark.runner.acceptance import Drafted, passes
from dspark.runner.score import Finished
from dspark.training.sources import Sample


@dataclass(frozen=True, slots=True)
class Rollout:
    """trajectories in the folder's order, their rounds by id, and the seconds that generating took,
    rewards apart (0 where all of it was there already). policy: fingerprint of the weights that sampled."""

    trajectories: list[Trajectory]
    rounds: dict[str, list[Round]]
    seconds: float
    policy: str

    @property
    def rewards(self) -> Tensor:
        """[S] fp64, NaN where there is none."""
        return torch.tensor([float("nan") if t.reward is None else t.reward for t in self.trajectories]).double()

    @property
    def groups(self) -> Tensor:
        """[S] int64: which group a trajectory is of."""
        names = {name: i for i, name in enumerate(dict.fromkeys(t.group_id for t in self.trajectories))}
        return torch.tensor([names[t.group_id] for t in self.trajectories])

    def passes(self) -> tuple[int, int]:
        """Passes of the policy that decoded, one for each token that came without drafts too; drafts accepted."""
        taken = 0
        for t in self.trajectories:
            last = len(t.prompt_ids) + len(t.response_ids) - 1
            taken += passes(Drafted(t.domain, self.rounds.get(t.trajectory_id, []), last), len(t.response_ids))
        return taken, sum(r.accepted for some in self.rounds.values() for r in some)

    def samples(self) -> list[Sample]:
        """As the draft model's training reads them, with the rounds that it drafted itself."""
        own = {key: tuple(r for r in some if r.source == "drafter") for key, some in self.rounds.items()}
        return [_sample(t, own.get(t.trajectory_id, ())) for t in self.trajectories]


def finished(trajectories: Sequence[Trajectory]) -> list[Finished]:
    return [Finished(t.prompt_ids, t.response_ids, t.params) for t in trajectories]


def roll(
    prompts: Sequence[Prompt],
    engine: Generator,
    config: RolloutConfig,
    facts: Mapping[str, Any],
    eos_ids: tuple[int, ...],
    tokenizer: Any,
    reward: Reward,
    max_failed_share: float,
) -> Rollout:
    """Collects into config.out, or finds it there. Raises DsparkError when the folder is another rollout's, and when
    more than `max_failed_share` of the samples have no reward. No prompts: a rank for which none were left."""
    if not prompts:
        return Rollout([], {}, 0.0, facts["target"])
    timed = _Timed(engine)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    summary = collect(prompts, timed, config, config.out, dict(facts), eos_ids=eos_ids, decode=decode, reward=reward)
    failed = summary["rewards_missing"]
    if failed > max_failed_share * summary["trajectories"]:
        aside = _set_aside(Path(config.out))
        said = "; ".join(summary["reward_errors"]) or "an earlier run of this folder met them"
        raise DsparkError(
            f"{config.out}: expected rewards, but the function failed on {failed} of {summary['trajectories']} samples "
            f"({said}). If what it needs was away, give the same command again (--ckpt_path last.ckpt): this rollout, "
            f"now in {aside}, is made anew. Or raise max_failed_share. A function that is mended is another run's."
        )
    return Rollout(read_trajectories(config.out), read_rounds(config.out), timed.seconds, facts["target"])


class _Timed:
    """A generator that keeps what it took, the time in `on_finish` (rewards, files) left out."""

    def __init__(self, engine: Generator):
        self._engine, self.seconds = engine, 0.0

    def generate(self, requests: list[Request], on_finish: Any = None) -> list[Completion]:
        began, outside = time.perf_counter(), 0.0

        def finish(index: int, completion: Completion) -> None:
            nonlocal outside
            start = time.perf_counter()
            if on_finish:
                on_finish(index, completion)
            outside += time.perf_counter() - start

        completions = self._engine.generate(requests, finish)
        self.seconds += time.perf_counter() - began - outside
        return completions


def _set_aside(made: Path) -> Path:
    """Out of the way of a rollout of that number: failed-NUMBER, or the next name that is free."""
    names = (made.with_name(f"failed-{made.name}{f'-{n}' if n else ''}") for n in itertools.count())
    aside = next(name for name in names if not name.exists())
    made.rename(aside)
    return aside


def folder(root: str | Path, number: int) -> Path:
    return Path(root) / f"{number:06d}"


def _sample(t: Trajectory, rounds: tuple[Round, ...]) -> Sample:
    ids = torch.tensor([*t.prompt_ids, *t.response_ids])
    return Sample(t.trajectory_id, t.prompt_id, t.domain, ids, torch.arange(len(ids)) >= len(t.prompt_ids), (), rounds)
