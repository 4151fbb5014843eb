"""Acceptance by slot and by how deep in its context a round is: does a draft model that was trained on short answers
hold up behind long ones?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dspark.contracts import Round
from dspark.runner.acceptance import Drafted, acceptance

EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096)
_SHOWN = 8  # slots in one table


@dataclass(frozen=True, slots=True)
class Depth:
    """Rounds whose anchor lies at low ... high - 1 (high None: and beyond). tau: tokens per round. per_slot: acceptance
    of slot k given all before it, None where never tried."""

    low: int
    high: int | None
    rounds: int
    tau: float
    per_slot: tuple[float | None, ...]


def by_depth(sequences: Sequence[Drafted], edges: Sequence[int] = EDGES) -> list[Depth]:
    """One entry per span of depths that has rounds."""
    slots = max((len(r.drafted) for s in sequences for r in s.rounds), default=0)
    found = []
    for low, high in zip(edges, [*edges[1:], None], strict=True):
        counted = acceptance([replace(s, rounds=_within(s.rounds, low, high)) for s in sequences], slots)
        if counted.rounds:
            found.append(Depth(low, high, counted.rounds, counted.tau, counted.per_slot))
    return found


def _within(rounds: Sequence[Round], low: int, high: int | None) -> list[Round]:
    return [r for r in rounds if low <= r.anchor and (high is None or r.anchor < high)]


def as_lines(found: Sequence[Depth]) -> list[str]:
    """At most 80 columns; blocks of more than eight slots are told eight at a time."""
    slots = len(found[0].per_slot) if found else 0
    starts = range(0, max(slots, 1), _SHOWN)
    return [line for first in starts for line in _table(found, range(first, min(first + _SHOWN, slots)))]


def _table(found: Sequence[Depth], slots: range) -> list[str]:
    lines = [f"{'context':<14}{'rounds':>8}{'tau':>7}  slot" + "".join(f"{k + 1:>5}" for k in slots)]
    for one in found:
        span = f"{one.low} and more" if one.high is None else f"{one.low} to {one.high - 1}"
        rates = "".join(f"{'-' if rate is None else f'{rate:.0%}':>5}" for rate in (one.per_slot[k] for k in slots))
        lines.append(f"{span:<14}{one.rounds:>8}{one.tau:>7.2f}      {rates}")
    return lines
