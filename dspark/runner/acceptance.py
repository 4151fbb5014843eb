"""Acceptance statistics of recorded rounds. Pure functions over plain records.

Two figures the field mixes are kept apart: tokens per round (tau) counts the token the target adds itself, accepted
drafts per round does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dspark.contracts import Round


@dataclass(frozen=True, slots=True)
class Acceptance:
    """rounds; tau: mean tokens a round added, the target's own included where it came (a sequence may end on an
    accepted draft); accepted: mean accepted drafts per round; per_slot: observed rate at which slot k is accepted given
    that all before it were (None where never observed)."""

    rounds: int
    tau: float
    accepted: float
    per_slot: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Drafted:
    """One sequence: its domain, its rounds in order, and the position of its last token."""

    domain: str
    rounds: Sequence[Round]
    last: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over rounds: how many, the tokens they added (the target's own included), the drafts accepted; per slot how
    often it was tried (all before it accepted, itself verified) and how often it passed."""

    rounds: int
    tokens: int
    accepted: int
    tried: tuple[int, ...]
    passed: tuple[int, ...]


def count(sequence: Drafted, slots: int) -> Counts:
    """The sums of one sequence's rounds, for blocks of ``slots`` drafts."""
    tried, passed = [0] * slots, [0] * slots
    accepted = tokens = 0
    for r in sequence.rounds:
        accepted += r.accepted
        tokens += _added(sequence, r)
        for k in range(min(r.accepted + 1, r.verified)):
            tried[k] += 1
            passed[k] += k < r.accepted
    return Counts(len(sequence.rounds), tokens, accepted, tuple(tried), tuple(passed))


def passes(sequence: Drafted, new: int) -> int:
    """Passes of the target that decoded `new` tokens: rounds with drafts, and one for each token that came without. The
    first token comes from the prompt's own pass."""
    return len(sequence.rounds) + new - 1 - sum(_added(sequence, r) for r in sequence.rounds)


def _added(sequence: Drafted, r: Round) -> int:
    """Tokens that a round added: a sequence may end on an accepted draft."""
    return min(r.accepted + 1, sequence.last - r.anchor)


def acceptance(sequences: Iterable[Drafted], slots: int) -> Acceptance:
    """Statistics over all rounds for blocks of ``slots`` drafts. Without any round tau is 1: nothing was drafted."""
    counted = [count(sequence, slots) for sequence in sequences]
    rounds, tokens, accepted = (sum(getattr(c, name) for c in counted) for name in ("rounds", "tokens", "accepted"))
    tried, passed = ([sum(getattr(c, name)[k] for c in counted) for k in range(slots)] for name in ("tried", "passed"))
    rates = tuple(p / t if t else None for p, t in zip(passed, tried, strict=True))
    return Acceptance(rounds, tokens / rounds if rounds else 1.0, accepted / rounds if rounds else 0.0, rates)


def by_domain(sequences: Iterable[Drafted], slots: int) -> dict[str, Acceptance]:
    """The same per domain; "overall" first."""
    grouped: dict[str, list[Drafted]] = defaultdict(list)
    for sequence in sequences:
        grouped[sequence.domain].append(sequence)
    everything = [s for some in grouped.values() for s in some]
    return {"overall": acceptance(everything, slots)} | {d: acceptance(grouped[d], slots) for d in sorted(grouped)}
