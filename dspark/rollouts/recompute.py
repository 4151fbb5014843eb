"""Log-probabilities by our target for what another engine has sampled, so that a trainer's are the same bits.

A token that the other engine drew and our law does not keep (its top-p edge lies elsewhere by a rounding) has
log-probability -inf with us. It stays so: whoever stores it sets it aside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dspark.contracts import Completion, Request, SamplingParams
from dspark.rollouts.collect import Generator

Score = Callable[[tuple[int, ...], tuple[int, ...], SamplingParams], tuple[Any, Any]]  # Engine.score


@dataclass(slots=True)
class Compared:
    """The other engine's log-probabilities against ours, where both are finite: how many tokens, how many of them are
    other bits, and the largest difference in nats."""

    tokens: int = 0
    differing: int = 0
    largest: float = 0.0

    def count(self, theirs: Sequence[float], ours: Sequence[float]) -> None:
        for a, b in zip(theirs, ours, strict=True):
            if math.isfinite(a) and math.isfinite(b):
                self.tokens += 1
                self.differing += a != b
                self.largest = max(self.largest, abs(a - b))


class Recomputed:
    """A Generator: what `generator` samples, with the log-probabilities that `score` gives it."""

    def __init__(self, generator: Generator, score: Score):
        self._generator, self._score = generator, score
        self.compared = Compared()

    def generate(
        self, requests: list[Request], on_finish: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]:
        done: dict[int, Completion] = {}

        def ended(index: int, completion: Completion) -> None:
            done[index] = self._ours(requests[index], completion)
            if on_finish:
                on_finish(index, done[index])

        self._generator.generate(requests, ended)
        return [done[index] for index in range(len(requests))]

    def _ours(self, request: Request, completion: Completion) -> Completion:
        logprobs, raw = self._score(request.prompt_ids, completion.token_ids, request.params)
        ours = replace(completion, logprobs=tuple(logprobs.tolist()), raw_logprobs=tuple(raw.tolist()))
        self.compared.count(completion.logprobs, ours.logprobs)
        return ours
