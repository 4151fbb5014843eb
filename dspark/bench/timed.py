"""A batch of requests through the real runner, with the time of every round; and what repeats of one add up to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from dspark.contracts import Completion, Request
from dspark.runner.engine import Engine, Run
from dspark.runner.sequence import Sequence as Running
from dspark.scorecard.measure import bits

Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class Timed:
    """completions: in the order of the requests. seconds: of all rounds; user_seconds: of each round, times the
    requests that were in flight in it."""

    completions: list[Completion]
    seconds: float
    user_seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.completions)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def user_rate(self) -> float:
        """Tokens per second and request in flight."""
        return self.tokens / self.user_seconds


def timed(engine: Engine, requests: Sequence[Request]) -> Timed:
    """Finish all requests, warm: the first of them goes before. Raises DsparkError for requests that the runner cannot
    finish."""
    engine.generate(list(requests[:1]))
    return clocked(engine, requests)


def clocked(engine: Engine, requests: Sequence[Request]) -> Timed:
    """As timed, of an engine that must not have seen a request before."""
    run, done = engine.begin(list(requests)), dict[int, Completion]()
    seconds = user_seconds = 0.0
    with torch.inference_mode():
        while run.busy:
            finished, spent = _round(run)
            seconds += spent
            user_seconds += spent * (len(run.running) + len(finished))
            done |= {sequence.index: sequence.completion() for sequence in finished}
    return Timed([done[i] for i in range(len(requests))], seconds, user_seconds)


def room(requests: Sequence[Request]) -> int:
    """kv_tokens for all of them: whoever has a place in the batch has rows."""
    return sum(len(r.prompt_ids) + r.params.max_tokens for r in requests)


def median_rate(runs: Sequence[Timed]) -> float:
    """Tokens per second."""
    return statistics.median(run.rate for run in runs)


def median_ratio(runs: Sequence[Timed], plain: Sequence[Timed]) -> float:
    """Of the speed to plain decoding's in the same repeat."""
    return statistics.median(run.rate / other.rate for run, other in zip(runs, plain, strict=True))


def differing(runs: Sequence[Timed], wanted: Sequence[Completion]) -> int:
    """Sequences that are not the wanted ones in some run."""
    return sum(any(bits(run.completions[i]) != bits(one) for run in runs) for i, one in enumerate(wanted))


def in_turn(names: Iterable[Name], repeat: int) -> list[Name]:
    """The order of a repeat: there and back again, so that a machine that slows down slows all alike."""
    return list(names)[:: -1 if repeat % 2 else 1]


def _round(run: Run) -> tuple[list[Running], float]:
    begin = time.perf_counter()
    finished = run.round()
    return finished, time.perf_counter() - begin
