"""What invariance costs: a pass of the target with our operations over one with plain torch's, in one interleaved run.

decode: as many sequences as rows, one token each, over a filled cache. prefill: one prompt of that many tokens. The
same Target.forward and LM head, the same weights; only the module of operations differs. Both sides' logits are
compared in the run. A ratio under 1 means that ours is faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.bench import plain
from dspark.contracts import DsparkError
from dspark.target.cache import KVCache
from dspark.target.decoder import Target

ROWS = (1, 8, 32, 128)
REPEATS = 7
CONTEXT = 128  # cached tokens per decoding sequence
AGREE = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # largest difference of a logit over the largest logit


@dataclass(frozen=True, slots=True)
class Tax:
    """Milliseconds of ours and of plain torch (medians), the ratio per repeat (minimum, median, maximum), and the
    largest difference of a logit over the largest logit."""

    kind: str
    rows: int
    ours_ms: float
    plain_ms: float
    ratio: tuple[float, float, float]
    difference: float


def tax(
    target: Target,
    rows: tuple[int, ...] = ROWS,
    repeats: int = REPEATS,
    on_step: Callable[[str], None] = lambda _: None,
) -> list[Tax]:
    """Decode and prefill at every row count. Raises DsparkError when the two sides' logits do not agree: no speed is
    reported of something that is wrong."""
    longest = target.config.max_position_embeddings
    if max(rows) > longest:
        raise DsparkError(f"bench tax: expected at most {longest} rows (the longest context), but got {max(rows)}.")
    found = []
    for kind, passes in (("decode", _decode), ("prefill", _prefill)):
        for count in rows:
            on_step(f"{kind} {count}")
            sides = passes(target, count), passes(target.remade(operations=plain), count)
            found.append(_compare(kind, count, *sides, repeats, target.dtype))
    return found


Pass = Callable[[], Tensor]


def _compare(kind: str, rows: int, ours: Pass, theirs: Pass, repeats: int, dtype: torch.dtype) -> Tax:
    with torch.inference_mode():
        a, b = ours(), theirs()
        difference = float((a - b).abs().max() / b.abs().max())
        if not difference <= AGREE[dtype]:
            raise DsparkError(
                f"bench tax: expected the logits of {kind} with {rows} rows to agree within {AGREE[dtype]} of the "
                f"largest, but they differ by {difference}. One side computes something else."
            )
        times = [_both(ours, theirs, turn % 2 == 1) for turn in range(repeats)]
    ratios = [mine / other for mine, other in times]
    mine, other = (statistics.median(t[i] for t in times) * 1000 for i in (0, 1))
    return Tax(kind, rows, mine, other, (min(ratios), statistics.median(ratios), max(ratios)), difference)


def _both(ours: Pass, theirs: Pass, swap: bool) -> tuple[float, float]:
    """Seconds of each, the second one first when swapped."""
    if swap:
        other = _timed(theirs)
        return _timed(ours), other
    return _timed(ours), _timed(theirs)


def _timed(run: Pass) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _ids(target: Target, count: int) -> Tensor:
    return torch.randint(target.vocab_size, (count,), generator=torch.Generator().manual_seed(count))


def _decode(target: Target, rows: int) -> Pass:
    """One token for each of ``rows`` sequences after CONTEXT cached ones, the same ones for all."""
    config, room = target.config, CONTEXT + 1
    cache = KVCache(target.config.cached_windows, rows * room, config.num_kv_heads, config.head_dim, target.dtype)
    first = torch.arange(CONTEXT)
    target.forward(_ids(target, CONTEXT), first, first, torch.zeros_like(first), first + 1, cache)
    for arena in (*cache.k, *cache.v):
        arena.view(rows, room, *arena.shape[1:])[1:] = arena[:room]
    ids, begin = _ids(target, rows), torch.arange(rows) * room
    positions = torch.full((rows,), CONTEXT)

    def run() -> Tensor:
        at = begin + positions
        hidden, _ = target.forward(ids, positions, at, begin, at + 1, cache)
        return target.logits(hidden)

    return run


def _prefill(target: Target, rows: int) -> Pass:
    """One prompt of ``rows`` tokens, and the logits of its last."""
    ids = _ids(target, rows)

    def run() -> Tensor:
        hidden, _, _ = target.forward_sequences([ids])
        return target.logits(hidden[-1:])

    return run
