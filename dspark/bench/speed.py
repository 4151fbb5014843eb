"""Speed as a ratio from one interleaved run: engines in turn over the same requests, outputs compared in the same run.

Absolute figures belong to the machine they were measured on; the ratio is what is worth quoting.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dspark.contracts import Completion, Request
from dspark.runner import Engine
from dspark.scorecard.measure import bits

Spread = tuple[float, float, float]  # minimum, median, maximum over the repeats


@dataclass(frozen=True, slots=True)
class Speed:
    """tokens/s, and the ratio to the first engine of the same repeat; mismatched: requests whose tokens,
    log-probabilities or end differ from the first engine's."""

    rate: Spread
    ratio: Spread
    mismatched: int
    tokens: int


def compare(
    engines: Mapping[str, Engine], requests: list[Request], repeats: int = 3, on_step: Callable[[], None] | None = None
) -> dict[str, Speed]:
    """Runs every request alone (speed at batch 1) through every engine in turn, ``repeats`` times, after a warm-up.
    The first engine is the baseline. on_step() is called after each request of each engine."""
    for engine in engines.values():
        engine.generate(requests[:1])
    rates: dict[str, list[float]] = {name: [] for name in engines}
    mismatched, tokens = dict.fromkeys(engines, 0), 0
    for _ in range(repeats):
        seconds, tokens = dict.fromkeys(engines, 0.0), 0
        for request in requests:
            outputs = {}
            for name, engine in engines.items():
                outputs[name], spent = _timed(engine, request)
                seconds[name] += spent
                if on_step:
                    on_step()
            first = next(iter(outputs.values()))
            tokens += len(first.token_ids)
            for name, got in outputs.items():
                mismatched[name] += bits(got) != bits(first)
        for name in engines:
            rates[name].append(tokens / seconds[name])
    base = next(iter(rates.values()))
    return {
        name: Speed(_spread(own), _spread([a / b for a, b in zip(own, base, strict=True)]), mismatched[name], tokens)
        for name, own in rates.items()
    }


def _timed(engine: Engine, request: Request) -> tuple[Completion, float]:
    started = time.perf_counter()
    (completion,) = engine.generate([request])
    return completion, time.perf_counter() - started


def _spread(values: list[float]) -> Spread:
    return min(values), statistics.median(values), max(values)
