"""A runner that is a pure function of each request, and what collecting needs around it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dspark.contracts import Completion, Request, Round, SamplingParams
from dspark.rollouts.collect import RolloutConfig, collect
from dspark.rollouts.manifest import run_facts

STOP = 7


@dataclass(frozen=True)
class FakePrompt:
    prompt_id: str
    domain: str
    messages: tuple[dict[str, str], ...]
    prompt_ids: tuple[int, ...]


def make_prompts(count: int = 6) -> list[FakePrompt]:
    domains = ("math", "code", "chat")
    return [
        FakePrompt(f"p{i:02d}", domains[i % 3], ({"role": "user", "content": f"question {i} é\u2028"},), (1, i + 2, 3))
        for i in range(count)
    ]


def complete(request: Request) -> Completion:
    """Tokens, log-probabilities and rounds that depend on the prompt and the parameters alone."""
    key = hashlib.sha256(repr((request.prompt_ids, request.params)).encode()).digest()
    rng = np.random.Generator(np.random.Philox(int.from_bytes(key[:8], "little")))
    length = int(rng.integers(1, request.params.max_tokens + 1))
    tokens = [int(t) for t in rng.integers(8, 50_000, length)]
    stopped = length < request.params.max_tokens
    if stopped:
        tokens[-1] = STOP
    logprobs, raw = (tuple((-rng.exponential(size=length)).astype(np.float32).tolist()) for _ in range(2))
    rounds = _rounds(rng, len(request.prompt_ids) - 1, tokens)
    return Completion(tuple(tokens), logprobs, raw, "stop" if stopped else "length", rounds, request.params.seq_seed)


def _rounds(rng: np.random.Generator, anchor: int, tokens: list[int]) -> tuple[Round, ...]:
    rounds, done = [], 0
    while done < len(tokens):
        accepted = min(int(rng.integers(0, 4)), len(tokens) - done)
        drafted = (*tokens[done : done + accepted], *(int(t) for t in rng.integers(0, 8, 4)))[:4]
        confidences = tuple(float(c) for c in rng.random(4, dtype=np.float32))
        rounds.append(Round(anchor + done, drafted, 4, accepted, confidences))
        done += accepted + 1
    return tuple(rounds)


class FakeEngine:
    """Finishes requests in an order of its own: `seed` shuffles it, `batch` bounds how far it strays.

    stop_after: raises after so many completions, as a crash would. delay: seconds per completion. alter: applied to
    every completion, for replays that differ. announce: call on_finish at all.
    """

    def __init__(
        self,
        batch: int = 4,
        seed: int = 0,
        stop_after: int | None = None,
        delay: float = 0.0,
        alter: Callable[[Request, Completion], Completion] | None = None,
        announce: bool = True,
    ):
        self.batch, self.seed, self.stop_after, self.delay = batch, seed, stop_after, delay
        self.alter, self.announce = alter, announce
        self.generated = 0

    def generate(
        self, requests: list[Request], on_finish: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]:
        rng = np.random.Generator(np.random.Philox(self.seed))
        done: dict[int, Completion] = {}
        for start in range(0, len(requests), self.batch):
            group = np.arange(start, min(start + self.batch, len(requests)))
            for index in rng.permutation(group).tolist():
                if self.stop_after is not None and self.generated >= self.stop_after:
                    raise RuntimeError("crash")
                time.sleep(self.delay)
                self.generated += 1
                done[index] = self._complete(requests[index])
                if on_finish and self.announce:
                    on_finish(index, done[index])
        return [done[i] for i in range(len(requests))]

    def score(
        self, prompt_ids: tuple[int, ...], response_ids: tuple[int, ...], params: SamplingParams
    ) -> tuple[np.ndarray, np.ndarray]:
        completion = self._complete(Request(prompt_ids, params))
        return np.array(completion.logprobs, np.float32), np.array(completion.raw_logprobs, np.float32)

    def _complete(self, request: Request) -> Completion:
        completion = complete(request)
        return self.alter(request, completion) if self.alter else completion


def facts(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "target": "aa" * 32,
        "drafter": "bb" * 32,
        "calibration": None,
        "tokenizer": "cc" * 32,
        "verifier": "coupled",
        "dtype": "float32",
        "device": "cpu",
        "kernels": {"sources": "dd", "threads": 1},
        "threads": 1,
    }
    return run_facts(**{**base, **changes})


# 18 trajectories; a shard of 5 takes one whole group of 3.
CONFIG = RolloutConfig(samples_per_prompt=3, max_tokens=9, shard_size=5, stop_ids=(STOP,), run_seed=11)


SMALL = replace(CONFIG, samples_per_prompt=2, limit=3, shard_size=4)  # six trajectories in two shards


def run(
    out: Path, engine: FakeEngine | None = None, config: RolloutConfig = CONFIG, prompts: Any = None, **kw: Any
) -> dict[str, Any]:
    base = kw.pop("base", None) or facts(verifier=config.verifier)
    return collect(prompts or make_prompts(), engine or FakeEngine(), config, str(out), base, **kw)


def with_config(**changes: Any) -> RolloutConfig:
    return replace(CONFIG, **changes)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
