"""Requests that come over time: a runner that takes each into the batch at once, and a peer that serves by batches.

Arrivals are a Poisson process of a given rate, answers differ in length. Ours is continuous batching (Run.submit); a
peer without it takes whoever waits, up to a batch, pads, and goes on until the longest answer is done. Every one of our
answers is held against the answer to that request alone, bit for bit: whom it met in the batch does not show.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dspark.bench.peers import Peer
from dspark.contracts import Completion, Request
from dspark.runner import Engine
from dspark.scorecard.measure import bits


@dataclass(frozen=True, slots=True)
class Arrived:
    """rate: tokens/s from the first arrival to the last token. first, last: seconds from a request's arrival to its
    first and its last token, median and 95th percentile (first: None where a peer gives all tokens at once). wrong:
    answers that are not those of the request alone, of `checked`."""

    side: str
    requests: int
    rate: float
    first: tuple[float, float] | None
    last: tuple[float, float]
    wrong: int = 0
    checked: int = 0


def arrivals(count: int, per_second: float, seed: int = 0) -> list[float]:
    """Seconds from the start, ascending: a Poisson process."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / per_second, count)).tolist()


def serve(
    side: str, engine: Engine, requests: Sequence[Request], at: Sequence[float], check: int,
    on_done: Callable[[], object] = lambda: None,
) -> Arrived:  # fmt: skip
    """Ours, in real time. check: so many requests, spread over all, are answered again alone."""
    first, last, done, came = dict[int, float](), dict[int, float](), dict[int, Completion](), 0
    began = time.perf_counter()
    with torch.inference_mode():
        run = engine.open()
        while came < len(requests) or run.busy:
            now = time.perf_counter() - began
            while came < len(requests) and at[came] <= now:
                run.submit([requests[came]])
                came += 1
            if not run.busy:
                time.sleep(at[came] - now)
                continue
            finished = run.round()
            now = time.perf_counter() - began
            for sequence in [*run.running, *finished]:
                if len(sequence.tokens) > sequence.prompt_length:
                    first.setdefault(sequence.index, now)
            for sequence in finished:
                last[sequence.index], done[sequence.index] = now, sequence.completion()
                on_done()
    tokens = sum(len(c.token_ids) for c in done.values())
    chosen = range(0, len(requests), max(1, len(requests) // check))
    wrong = sum(bits(engine.generate([requests[i]])[0]) != bits(done[i]) for i in chosen)
    return Arrived(
        side, len(requests), tokens / (max(last.values()) - at[0]), _two([first[i] - t for i, t in enumerate(at)]),
        _two([last[i] - t for i, t in enumerate(at)]), wrong, len(chosen),
    )  # fmt: skip


def serve_by_batches(
    peer: Peer, requests: Sequence[Request], at: Sequence[float], batch: int,
    on_done: Callable[[], object] = lambda: None,
) -> Arrived:  # fmt: skip
    """A peer's, in real time: a batch at a time, each as long as its longest answer; only asked-for tokens count."""
    last: list[float] = []
    began = time.perf_counter()
    while len(last) < len(requests):
        now = time.perf_counter() - began
        waiting = [r for r, t in zip(requests[len(last) :], at[len(last) :], strict=True) if t <= now][:batch]
        if not waiting:
            time.sleep(at[len(last)] - now)
            continue
        longest = max(r.params.max_tokens for r in waiting)
        peer.answer([Request(r.prompt_ids, replace(r.params, max_tokens=longest)) for r in waiting], batch)
        last += [time.perf_counter() - began] * len(waiting)
        for _ in waiting:
            on_done()
    tokens = sum(r.params.max_tokens for r in requests)
    return Arrived(
        peer.name, len(requests), tokens / (last[-1] - at[0]), None,
        _two([end - t for end, t in zip(last, at, strict=True)]),
    )  # fmt: skip


def _two(values: Sequence[float]) -> tuple[float, float]:
    return statistics.median(values), float(np.quantile(values, 0.95))
