"""One RL step, timed in turn: with log-probabilities that match bit for bit, and with plain torch's operations.

A step: the runner answers every prompt several times (a rollout), then one update on it (teacher-forced scoring, the
loss' gradient, AdamW). Sides:
    matching       our operations in runner and trainer; a prompt is run once for its samples
    whole prompts  the same, each sample scored with a prompt of its own, as trainers commonly do
    plain          plain torch's operations in runner and trainer, whole prompts
    speculative    matching, and the rollout drafts (where a draft model is given)
Answers are of one length on every side, so all do the same work. Checked in the run: the first three's updates start
from log-probabilities that equal the recorded ones, the plain ones are said by how much not; speculative trajectories
are the matching ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark import ops
from dspark.bench import plain
from dspark.bench.timed import in_turn
from dspark.contracts import Completion, DsparkError, Request
from dspark.drafter.model import Drafter
from dspark.rl.masters import Masters
from dspark.rl.mismatch import spread
from dspark.rl.policy import Policy
from dspark.runner import Engine, EngineOptions
from dspark.runner.score import Finished
from dspark.runner.verify import SamplingRows
from dspark.target.decoder import Target

REPEATS = 3
# Seconds of rollout and update, the largest difference of a log-probability, what was rolled out.
Ran = tuple[float, float, float, list[Completion]]
MATCHING, WHOLE, PLAIN, SPECULATIVE = "matching", "whole prompts", "plain", "speculative"


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one side, seconds: minimum, median, maximum over the repeats. ratio: of its step to the plain one of the same
    repeat. differs: the largest difference between a recorded log-probability and the trainer's. tau: tokens a round.
    """

    rollout: tuple[float, float, float]
    update: tuple[float, float, float]
    ratio: tuple[float, float, float]
    differs: float
    tau: float


def bench_rl(
    target: Target, drafter: Drafter | None, requests: Sequence[Request], batch: int, repeats: int = REPEATS,
    on_run: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:  # fmt: skip
    """requests: without stop tokens, the samples of a prompt side by side. Raises DsparkError when a side that must
    match does not: no speed is told of something that is wrong."""
    sides = {name: _Side(name, target, drafter, batch) for name in (MATCHING, WHOLE, PLAIN)}
    if drafter is not None:
        sides[SPECULATIVE] = _Side(SPECULATIVE, target, drafter, batch)
    for side in sides.values():  # warm: kernels, arenas, packed weights
        side.run(requests[:2])
    found: dict[str, list[Ran]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in in_turn(sides, repeat):
            found[name].append(sides[name].run(requests))
            on_run()
        _check(found, repeat)
    steps = {name: [r + u for r, u, _, _ in runs] for name, runs in found.items()}
    return {
        name: Timing(
            _three([run[0] for run in runs]), _three([run[1] for run in runs]),
            _three([a / b for a, b in zip(steps[name], steps[PLAIN], strict=True)]),
            max(run[2] for run in runs), _tau(runs[0][3]),
        )
        for name, runs in found.items()
    }  # fmt: skip


def _check(found: dict[str, list[Ran]], repeat: int) -> None:
    first = found[MATCHING][repeat]
    for name in (n for n in (MATCHING, WHOLE, SPECULATIVE) if n in found):
        _, _, differs, done = found[name][repeat]
        same = all(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in zip(done, first[3], strict=True))
        if differs or not same:
            raise DsparkError(
                f"bench rl: expected the step '{name}' to match bit for bit, but its log-probabilities differ by "
                f"{differs:.3g} (same trajectories: {same}). Run `dspark doctor`."
            )


class _Side:
    def __init__(self, name: str, target: Target, drafter: Drafter | None, batch: int):
        self.whole = name in (WHOLE, PLAIN)
        self.policy = Policy(target.remade(operations=plain if name == PLAIN else ops))
        self.masters = Masters(self.policy.named_parameters())
        self.optimizer = torch.optim.AdamW(self.masters.tensors, lr=0.0)  # so that every repeat does the same
        self.drafter = drafter if name == SPECULATIVE else None
        if self.drafter is not None:
            self.drafter.bind(self.policy.target.embed_weight, self.policy.target.head_weight)
        self.engine = Engine(self.policy.target, self.drafter, EngineOptions(max_batch=batch, kv_tokens=1 << 16))

    def run(self, requests: Sequence[Request]) -> Ran:
        began = time.perf_counter()
        done = self.engine.generate(list(requests))
        rolled = time.perf_counter()
        sequences = [Finished(r.prompt_ids, c.token_ids, r.params) for r, c in zip(requests, done, strict=True)]
        logprobs = self._logprobs(sequences)
        recorded = torch.tensor([x for c in done for x in c.logprobs])
        gains = torch.linspace(-1, 1, len(recorded))
        (-(logprobs - recorded).exp() * gains).mean().backward()
        self.masters.take()
        torch.nn.utils.clip_grad_norm_(self.masters.tensors, 1.0)
        self.optimizer.step()
        self.masters.give()
        return rolled - began, time.perf_counter() - rolled, spread(logprobs, recorded), done

    def _logprobs(self, sequences: Sequence[Finished]) -> Tensor:
        if not self.whole:
            return self.policy.logprobs(sequences)[0]
        target = self.policy.target
        target.refresh()
        inputs = [torch.tensor([*s.prompt_ids, *s.response_ids][:-1]) for s in sequences]
        hidden, _, offsets = target.forward_sequences(inputs)
        counts = torch.tensor([len(s.response_ids) for s in sequences])
        rows = torch.cat([torch.arange(e - n, e) for e, n in zip(offsets[1:].tolist(), counts.tolist(), strict=True)])
        tokens = torch.tensor([t for s in sequences for t in s.response_ids])
        return (
            SamplingRows.of([s.params for s in sequences]).repeat(counts).logprob(target.logits(hidden[rows]), tokens)
        )


def _tau(done: Sequence[Completion]) -> float:
    rounds = [r for c in done for r in c.rounds]
    return sum(r.accepted + 1 for r in rounds) / len(rounds) if rounds else 1.0


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)
