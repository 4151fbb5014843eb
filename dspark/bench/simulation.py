"""Many users on one runner, round by round, over a capacity curve: what a policy would yield before anyone tries it.

A discrete-event simulation of the runner's own loop (engine.py): admit, draft, schedule, verify, commit. A round costs
what the curve says of its rows; what a request's block would have gained is drawn from recorded rounds of its domain
that were verified whole, confidences and verdict together. The schedule is the runner's own code.
Left out on purpose: that a request's rounds resemble each other, contexts that grow, the cost of scheduling itself,
prompts that begin alike and are read once (the runner beside it is run without that too), memory (whoever has a place
has room), and that no speculation needs no features of a prompt (its rows are priced as with the draft model).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from dspark.contracts import DsparkError, MTPPredictInfo, Round
from dspark.runner.curve import CapacityCurve
from dspark.runner.schedule import Policy, Scheduler, draft_limit

NONE = "none"


@dataclass(frozen=True, slots=True)
class Way:
    """How verification lengths are chosen. policy: of schedule.py, or none: no draft model at all. verify_tokens: the
    most of a block that is verified. threshold: of the policy of that name."""

    policy: Policy | str
    verify_tokens: int = 0
    threshold: float = 0.0

    @property
    def title(self) -> str:
        if self.policy == "fixed":
            return f"fixed {self.verify_tokens}"
        return f"threshold {self.threshold:g}" if self.policy == "threshold" else str(self.policy)


@dataclass(frozen=True, slots=True)
class Job:
    """A request to come: whose recorded rounds it draws from, and how many tokens it reads and writes."""

    domain: str
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """tokens, seconds: of all jobs. user_rate: tokens per second and request in flight. rounds: of decoding requests,
    summed over requests; verified, accepted: drafts, in them."""

    tokens: int
    seconds: float
    user_rate: float
    rounds: int
    verified: int
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


Pools = Mapping[str, Sequence[Round]]


def pools_of(recorded: Mapping[str, Sequence[Round]]) -> dict[str, list[Round]]:
    """Per domain the rounds that can be drawn from: whole blocks, all of them verified, with confidences. Raises
    DsparkError when a domain has none."""
    slots = max((len(r.drafted) for rounds in recorded.values() for r in rounds), default=0)
    pools = {
        domain: [r for r in rounds if r.verified == slots and len(r.confidences) == slots]
        for domain, rounds in recorded.items()
    }
    empty = sorted(domain for domain, rounds in pools.items() if not rounds)
    if empty or not pools:
        raise DsparkError(
            f"simulate: expected rounds of whole blocks with confidences, but got none of {', '.join(empty) or 'any'}. "
            "Roll out with a draft model that has a confidence head (dspark rollout, gamma unset)."
        )
    return pools


@dataclass
class _Request:
    job: Job
    prefilled: int = 0
    written: int = 0

    @property
    def remaining(self) -> int:
        return self.job.response_tokens - self.written


_NOTHING = MTPPredictInfo((), None), 0  # a round without drafts


@dataclass
class _Simulation:
    pools: Pools
    curve: CapacityCurve
    way: Way
    users: int
    prefill_chunk: int
    waiting: deque[Job]
    random: np.random.Generator
    scheduler: Scheduler
    running: list[_Request] = field(default_factory=list)
    seconds: float = 0.0
    user_seconds: float = 0.0
    rounds: int = 0
    verified: int = 0
    accepted: int = 0

    def round(self) -> None:
        """One pass of the target, as Run.round in engine.py."""
        while self.waiting and len(self.running) < self.users:
            self.running.append(_Request(self.waiting.popleft()))
        decoding = [r for r in self.running if r.prefilled == r.job.prompt_tokens]
        chunks = self._chunks()
        asked = self.way.policy != NONE and bool(decoding) and self.scheduler.drafts(len(decoding))
        drawn = [self._draw(r) if asked else _NOTHING for r in decoding]
        prompt_rows = sum(take for _, take in chunks)
        lengths = self.scheduler.lengths([info for info, _ in drawn], prompt_rows) if asked else [0] * len(decoding)
        self._pass(len(decoding), sum(lengths), prompt_rows, asked)
        for request, (_, accepted), length in zip(decoding, drawn, lengths, strict=True):
            gained = min(accepted, length)
            request.written += gained + 1
            self.rounds, self.verified, self.accepted = self.rounds + 1, self.verified + length, self.accepted + gained
        for request, take in chunks:
            request.prefilled += take
            request.written += request.prefilled == request.job.prompt_tokens
        self.running = [r for r in self.running if r.remaining > 0]

    def _pass(self, decoding: int, drafts: int, prompt_rows: int, asked: bool) -> None:
        drafting = self.curve.drafting(decoding) if asked else 0.0
        seconds = self.curve.mixed(decoding + drafts, prompt_rows) + drafting
        self.seconds += seconds
        self.user_seconds += seconds * len(self.running)

    def _chunks(self) -> list[tuple[_Request, int]]:
        budget, chunks = self.prefill_chunk, []
        for request in self.running:
            left = request.job.prompt_tokens - request.prefilled
            if left and budget:
                chunks.append((request, min(left, budget)))
                budget -= chunks[-1][1]
        return chunks

    def _draw(self, request: _Request) -> tuple[MTPPredictInfo, int]:
        """A recorded round of the request's domain, cut to what it may still write: what is drafted, how much holds."""
        pool = self.pools[request.job.domain]
        seen = pool[int(self.random.integers(len(pool)))]
        n = draft_limit(len(seen.drafted), request.remaining)
        return MTPPredictInfo(seen.drafted[:n], seen.confidences[:n]), min(seen.accepted, n)


def simulate(
    pools: Pools, curve: CapacityCurve, way: Way, jobs: Sequence[Job], users: int, key: int = 0,
    prefill_chunk: int = 256,
) -> Outcome:  # fmt: skip
    """All jobs, at most `users` at once. key: fixes what is drawn."""
    policy = "fixed" if way.policy == NONE else cast(Policy, way.policy)
    scheduler = Scheduler(policy, way.verify_tokens, way.threshold, curve)
    random = np.random.Generator(np.random.Philox(key))
    state = _Simulation(pools, curve, way, users, prefill_chunk, deque(jobs), random, scheduler)
    while state.running or state.waiting:
        state.round()
    tokens = sum(job.response_tokens for job in jobs)
    return Outcome(tokens, state.seconds, tokens / state.user_seconds, state.rounds, state.verified, state.accepted)
