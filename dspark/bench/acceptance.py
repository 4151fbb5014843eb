"""Acceptance statistics of recorded rounds. Pure functions over plain records.

Two figures the field mixes are kept apart: tokens per round (tau) counts the token the target adds itself, accepted
drafts per round does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from dspark.contracts import Round


@dataclass(frozen=True, slots=True)
class Acceptance:
    """rounds; tau: mean tokens per round, bonus token included; accepted: mean accepted drafts per round; per_slot:
    observed rate at which slot k is accepted given that all before it were (None where never observed)."""

    rounds: int
    tau: float
    accepted: float
    per_slot: tuple[float | None, ...]


def acceptance(rounds: Iterable[Round], slots: int) -> Acceptance:
    """Statistics over ``rounds`` for blocks of ``slots`` drafts. With no round at all, tau is 1: nothing was
    drafted."""
    tried, passed = [0] * slots, [0] * slots
    count = accepted = 0
    for r in rounds:
        count += 1
        accepted += r.accepted
        for k in range(min(r.accepted + 1, r.verified)):
            tried[k] += 1
            passed[k] += k < r.accepted
    mean = accepted / count if count else 0.0
    rates = tuple(p / t if t else None for p, t in zip(passed, tried, strict=True))
    return Acceptance(count, 1.0 + mean, mean, rates)


def by_domain(rounds: Iterable[tuple[str, Iterable[Round]]], slots: int) -> dict[str, Acceptance]:
    """The same per domain, from (domain, rounds of one sequence); "overall" first."""
    grouped: dict[str, list[Round]] = defaultdict(list)
    for domain, some in rounds:
        grouped[domain].extend(some)
    everything = [r for some in grouped.values() for r in some]
    return {"overall": acceptance(everything, slots)} | {d: acceptance(grouped[d], slots) for d in sorted(grouped)}
