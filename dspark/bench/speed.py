"""Speed as a ratio from one interleaved run: A and B in turn over the same requests, outputs compared in the same run.

Absolute figures belong to the machine they were measured on; the ratio is what is worth quoting.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from dspark.contracts import Completion, Request
from dspark.runner import Engine


@dataclass(frozen=True, slots=True)
class Comparison:
    """tokens/s of both sides and the ratio of B to A, each (min, median, max) over the repeats; mismatched: requests
    whose token ids or log-probabilities differ between the sides."""

    baseline: tuple[float, float, float]
    candidate: tuple[float, float, float]
    ratio: tuple[float, float, float]
    mismatched: int
    tokens: int


def compare(
    baseline: Engine,
    candidate: Engine,
    requests: list[Request],
    repeats: int = 3,
    on_step: Callable[[], None] | None = None,
) -> Comparison:
    """Run both engines over ``requests`` ``repeats`` times, alternating request by request (one warm-up request
    each first). Each request runs alone: this is speed at batch 1."""
    for engine in (baseline, candidate):
        engine.generate(requests[:1])
    rates: list[tuple[float, float]] = []
    mismatched = tokens = 0
    for _ in range(repeats):
        seconds = [0.0, 0.0]
        tokens = 0
        for request in requests:
            first, second = (_timed(engine, request, seconds, i) for i, engine in enumerate((baseline, candidate)))
            tokens += len(first.token_ids)
            mismatched += (first.token_ids, first.logprobs) != (second.token_ids, second.logprobs)
            if on_step:
                on_step()
        rates.append((tokens / seconds[0], tokens / seconds[1]))
    return Comparison(
        _spread([a for a, _ in rates]),
        _spread([b for _, b in rates]),
        _spread([b / a for a, b in rates]),
        mismatched,
        tokens,
    )


def _timed(engine: Engine, request: Request, seconds: list[float], side: int) -> Completion:
    started = time.perf_counter()
    (completion,) = engine.generate([request])
    seconds[side] += time.perf_counter() - started
    return completion


def _spread(values: list[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)
