"""Measures the capacity curve: rounds of the real engine, on this machine, with this pair of models.

Requests with random prompts of one length are brought to the point of decoding; then rounds are timed in which every
one of them verifies so many drafts, drafting apart from the rest (the target's pass, sampling, verification, commit).
Widths take turns, so a machine that slows down slows all alike; a size counts with the median of its rounds. Chunks of
a prompt beside no decoding are timed too: their rows need less.
Left out on purpose: prompts of other lengths in one curve. A longer context makes every row dearer, not the curve
steeper; `--context` measures it at another.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dspark.contracts import DsparkError, MTPPredictInfo, Request, SamplingParams
from dspark.drafter.model import Drafter
from dspark.runner.curve import CapacityCurve
from dspark.runner.engine import Engine, EngineOptions, Run
from dspark.runner.schedule import fixed
from dspark.target.decoder import Target

PROMPT_ROWS = (16, 64, 256)  # sizes of a chunk, up to what the engine takes in a pass and the target in a context


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """requests: batch sizes that are tried. context: prompt tokens of each. repeats: rounds per size of batch and
    width. temperature, top_p: how tokens are drawn, which is a part of every round."""

    requests: Sequence[int] = (1, 2, 4, 8, 16, 32)
    context: int = 256
    repeats: int = 7
    temperature: float = 0.2
    top_p: float = 0.9

    def __post_init__(self) -> None:
        for name, values in (("requests", self.requests), ("context", [self.context]), ("repeats", [self.repeats])):
            if min(values, default=0) < 1:
                got = ", ".join(map(str, values)) or "none"
                raise DsparkError(f"profile: expected {name} of at least 1, but got {got}.")

    def params(self, max_tokens: int) -> SamplingParams:
        """Of a request that never stops by itself."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, max_tokens=max_tokens)


class _Width:
    """Stands in for a policy: every request verifies `width` drafts. rows: that the last round decoded."""

    def __init__(self) -> None:
        self.width = self.rows = 0

    def drafts(self, requests: int) -> bool:
        return True

    def lengths(self, predictions: Sequence[MTPPredictInfo], other_rows: int = 0) -> list[int]:
        lengths = fixed(predictions, self.width)
        self.rows = len(lengths) + sum(lengths)
        return lengths


def measure(
    target: Target,
    drafter: Drafter | None,
    options: ProfileOptions,
    facts: dict[str, Any] | None = None,
    on_batch: Callable[[int], None] = lambda requests: None,
) -> CapacityCurve:
    """The curve; without a draft model of passes alone. facts: kept in it. on_batch: told each batch size when it is
    done. Raises DsparkError when context and block do not fit the target."""
    passes: dict[int, list[float]] = defaultdict(list)
    drafting: dict[int, list[float]] = defaultdict(list)
    for requests in sorted(set(options.requests)):
        _check_context(target, options, requests, _written(drafter, options, requests))
    for requests in sorted(set(options.requests)):
        for rows, seconds, drafted in _rounds(target, drafter, options, requests):
            passes[rows].append(seconds - drafted)
            drafting[requests].append(drafted)
        on_batch(requests)
    prompts = {n: _chunks(target, drafter, options, n) for n in _prompt_rows(target)}
    return CapacityCurve(
        *_medians(passes), *_medians(drafting if drafter else {}), *_medians(prompts),
        facts={**(facts or {}), "context": options.context},
    )  # fmt: skip


def _medians(times: dict[int, list[float]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    sizes = sorted(times)
    return tuple(sizes), tuple(statistics.median(times[n]) for n in sizes)


def _rounds(
    target: Target, drafter: Drafter | None, options: ProfileOptions, requests: int
) -> list[tuple[int, float, float]]:
    """(rows of the round, its seconds, of which drafting) of every timed round of one batch size."""
    widths = _widths(drafter)
    run = _begin(target, drafter, options, requests)
    run.scheduler = width = _Width()  # 0 at first: whoever is through with its prompt adds one token a round
    found = []
    with torch.inference_mode():
        while run.waiting or any(s.prefilling for s in run.running):
            run.round()
        for repeat in range(options.repeats + 1):
            for width.width in widths:
                seconds = _timed(run)
                assert width.rows == requests * (width.width + 1), f"{requests} requests at {width.width}: {width.rows}"
                if repeat:  # the first of each is warm-up
                    found.append((width.rows, seconds, run.drafting_seconds))
    return found


def _widths(drafter: Drafter | None) -> range:
    return range(drafter.config.num_predictions + 1) if drafter else range(1)


def _written(drafter: Drafter | None, options: ProfileOptions, requests: int) -> int:
    """The most tokens a request writes: one a round while others' prompts are read, then what the timed rounds may."""
    widths, prefill = _widths(drafter), -(-requests * options.context // EngineOptions().prefill_chunk)
    return 1 + prefill + (options.repeats + 1) * sum(w + 1 for w in widths) + len(widths)


def _begin(target: Target, drafter: Drafter | None, options: ProfileOptions, requests: int) -> Run:
    """A run in which every request can still write what is timed when the last prompt has been read."""
    params = options.params(_written(drafter, options, requests))
    kv_tokens = requests * (options.context + params.max_tokens)
    engine_options = EngineOptions(max_batch=requests, kv_tokens=kv_tokens, reuse_prefixes=False)
    prompts = _prompts(target, requests, options.context)
    return Engine(target, drafter, engine_options).begin(
        [Request(ids, params.with_seed(i)) for i, ids in enumerate(prompts)]
    )


def _check_context(target: Target, options: ProfileOptions, requests: int, written: int) -> None:
    longest = target.config.max_position_embeddings
    if options.context + written > longest:
        raise DsparkError(
            f"profile: expected a context of at most {max(0, longest - written)} for {requests} requests (the target's "
            f"longest, {longest}, less what each writes while rounds are timed), but got {options.context}. Lower "
            "--context, --repeats or --requests."
        )


def _chunks(target: Target, drafter: Drafter | None, options: ProfileOptions, rows: int) -> list[float]:
    """Seconds of passes that read `rows` tokens of a prompt and nothing else. A prompt has one more, which is read, and
    answered, in a pass between them."""
    engine_options = EngineOptions(max_batch=1, prefill_chunk=rows, reuse_prefixes=False)
    prompts = _prompts(target, options.repeats + 1, rows + 1)
    params = options.params(1)
    run = Engine(target, drafter, engine_options).begin(
        [Request(ids, params.with_seed(i)) for i, ids in enumerate(prompts)]
    )
    found = []
    with torch.inference_mode():
        while run.busy:
            found.append(_timed(run))
            assert run.round(), "the last token of a prompt is read and answered here"
    return found[1:]  # the first is warm-up


def _timed(run: Run) -> float:
    begin = time.perf_counter()
    run.round()
    return time.perf_counter() - begin


def _prompt_rows(target: Target) -> list[int]:
    most = min(EngineOptions().prefill_chunk, target.config.max_position_embeddings - 2)
    return [n for n in PROMPT_ROWS if n <= most]


def _prompts(target: Target, count: int, length: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(row) for row in torch.randint(target.vocab_size, (count, length), generator=generator).tolist()]
