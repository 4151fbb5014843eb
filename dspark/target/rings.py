"""Sliding-window layers keep what they can still see: a ring of window + backtracking entries per sequence.

The key of position p lies in entry p % entries of its sequence's ring. A pass writes a sequence's m new tokens, and may
be asked later to forget all but the first of them; so entries = window + backtracking hold every key that any
continuation can see as long as m <= backtracking + 1. A larger m is a prompt chunk: its queries read the keys before it
from a copy made first, those in it from the call itself, and only its last tokens are kept.

Attention takes two ranges of rows as one sequence of keys, with bits that do not depend on where they lie
(dspark.ops.attention): a window that runs over the ring's edge is two ranges, and nothing is rotated or copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.contracts import DsparkError


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence in a pass: positions start ... start + count - 1, its ring number slot. prompt: a
    chunk of a prompt, whose tokens are final. floor: no key before this position is looked at (replay.py)."""

    slot: int
    start: int
    count: int
    prompt: bool
    floor: int = 0


@dataclass(frozen=True, slots=True)
class Ranges:
    """Two ranges of rows per query, [n] int64 each."""

    begin: Tensor
    end: Tensor
    begin2: Tensor
    end2: Tensor


@dataclass(frozen=True, slots=True)
class RingPass:
    """One pass over one window size. kept [M] of the pass' rows go to ring rows [M]. The first `decoding` rows of the
    pass read the ring after the write (ranges `ring`); the others read rows `tail` of the ring, copied before the
    write, then the chunks themselves (ranges `chunk`: of the copy, then of the pass' rows from `decoding` on)."""

    kept: Tensor
    rows: Tensor
    decoding: int
    ring: Ranges
    tail: Tensor
    chunk: Ranges


def plan(spans: Sequence[Span], window: int, entries: int) -> RingPass:
    """The pass of these spans, decoding ones first. Raises DsparkError when one could be rolled back past what its ring
    holds."""
    decoding = [s for s in spans if not s.prompt]
    chunks = [s for s in spans if s.prompt]
    assert spans == [*decoding, *chunks], "decoding spans come first"
    most = entries - window + 1
    for span in decoding:
        if span.count > most:
            raise DsparkError(
                f"runner: expected at most {most} tokens per sequence and pass (a ring of {entries} entries for a "
                f"window of {window}), but got {span.count}. Raise DEEPINFER_MAX_BACKTRACKING_TOKENS."
            )
    kept: list[int] = []
    rows: list[int] = []
    first = 0
    for span in spans:
        skip = max(0, span.count - entries)
        kept += range(first + skip, first + span.count)
        rows += [span.slot * entries + p % entries for p in range(span.start + skip, span.start + span.count)]
        first += span.count
    tail, chunk = _chunk_ranges(chunks, window, entries)
    return RingPass(
        torch.tensor(kept, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64),
        sum(s.count for s in decoding), _ring_ranges(decoding, window, entries), tail, chunk,
    )  # fmt: skip


def _ring_ranges(spans: Sequence[Span], window: int, entries: int) -> Ranges:
    found = []
    for span in spans:
        base = span.slot * entries
        for p in range(span.start, span.start + span.count):
            first, last = max(0, p - window + 1) % entries, p % entries
            if first <= last:
                found.append((base + first, base + last + 1, base, base))
            else:  # over the edge
                found.append((base + first, base + entries, base, base + last + 1))
    return _ranges(found)


def _chunk_ranges(spans: Sequence[Span], window: int, entries: int) -> tuple[Tensor, Ranges]:
    found: list[tuple[int, int, int, int]] = []
    tail: list[int] = []
    first = 0
    for span in spans:
        past = max(0, span.floor, span.start - window + 1)  # the first key that the chunk's first query sees
        before = range(past, span.start)
        base = len(tail)
        tail += [span.slot * entries + p % entries for p in before]
        for j in range(span.count):
            position = span.start + j
            lowest = max(position - window + 1, min(span.floor, position))
            gone = min(max(0, lowest - past), len(before))
            found.append((base + gone, len(tail), first + max(0, lowest - span.start), first + j + 1))
        first += span.count
    return torch.tensor(tail, dtype=torch.int64), _ranges(found)


def _ranges(found: Sequence[tuple[int, int, int, int]]) -> Ranges:
    columns = torch.tensor(found, dtype=torch.int64).reshape(-1, 4).unbind(1)
    return Ranges(*(column.contiguous() for column in columns))
