"""Verifier by policy by temperature: tokens per round, tokens per second, and whether the output is plain's.

At each temperature plain decoding and every way to verify take turns on the same requests, there and back again; a
speed is the median of the repeats, a ratio the median of those to plain in the same repeat. Every run's output is held
against plain's and against the way's first run.
Left out on purpose: a verifier's law where its samples are its own (rejection at a temperature), which no number of
samples proves; tests/runner/test_exact_laws.py enumerates it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dspark.bench.timed import Timed, differing, in_turn, median_rate, median_ratio, room, timed
from dspark.contracts import Completion, Request, VerifierName
from dspark.drafter.model import Drafter
from dspark.runner import Engine, EngineOptions
from dspark.runner.acceptance import Drafted, acceptance
from dspark.runner.curve import CapacityCurve
from dspark.runner.schedule import POLICIES, Policy
from dspark.target.decoder import Target

SAMPLING = ((0.0, 1.0), (0.2, 0.9), (1.0, 1.0))  # temperature, top-p
REPEATS = 3
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Verified:
    """tau: tokens per round, the target's own included; verified: drafts per round; rate: tokens/s; ratio: to plain
    decoding; same: sequences whose tokens and log-probabilities are plain decoding's in every repeat, of `sequences`;
    unsteady: those that differ between repeats. drafted, accepted, rejected: over the run; refused: why this way is
    none."""

    temperature: float
    verifier: str
    policy: str
    tau: float = 0.0
    verified: float = 0.0
    rate: float = 0.0
    ratio: float = 0.0
    same: int = 0
    unsteady: int = 0
    sequences: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    refused: str = ""

    @property
    def wrong(self) -> bool:
        """An output that had to be plain decoding's, or its own, and was not."""
        free = self.verifier == "rejection" and self.temperature > 0
        return self.unsteady > 0 or (not free and self.same < self.sequences)

    @property
    def conclusive(self) -> bool:
        """Whether equality proves anything: something was drafted, accepted and rejected."""
        return min(self.drafted, self.accepted, self.rejected) > 0

    @property
    def verdict(self) -> str:
        """yes, no, or inconclusive where nothing was drafted, accepted or rejected: then equality proves nothing."""
        if self.unsteady:
            return f"unsteady ({self.unsteady})"
        if self.same < self.sequences:
            return f"no ({self.sequences - self.same} of {self.sequences})" if self.wrong else "no (own sample)"
        return "yes" if self.conclusive else "inconclusive"


@dataclass(frozen=True, slots=True)
class Setting:
    """What every way has in common. threshold: of the policy of that name. max_batch: requests at once."""

    curve: CapacityCurve
    threshold: float
    max_batch: int
    repeats: int = REPEATS

    def options(self, requests: Sequence[Request]) -> EngineOptions:
        """Of plain decoding: room for so many of the requests at once."""
        return EngineOptions(max_batch=self.max_batch, kv_tokens=room(requests))

    def of_way(self, requests: Sequence[Request], verifier: VerifierName, policy: Policy) -> EngineOptions:
        some = self.options(requests)
        return replace(some, verifier=verifier, policy=policy, threshold=self.threshold, curve=self.curve)


def ways(temperature: float) -> list[tuple[VerifierName, Policy]]:
    """Every verifier that can be at a temperature, with every policy."""
    verifiers: tuple[VerifierName, ...] = ("coupled", "rejection")
    if temperature == 0.0:
        verifiers = ("greedy", *verifiers)
    return [(verifier, policy) for verifier in verifiers for policy in POLICIES]


def refusal(drafter: Drafter, verifier: str, policy: str) -> str:
    """Why the engine takes no such pair, in a few words; "" where it does."""
    if verifier != "rejection" or policy == "fixed":
        return ""
    if policy == "global":
        return "changes the law"
    return "the head knows the drafted token" if drafter.config.confidence_with_law else ""


def bench_verify(
    target: Target, drafter: Drafter, requests: Sequence[Request], setting: Setting,
    on_run: Callable[[], None] = lambda: None,
) -> list[Verified]:  # fmt: skip
    """Per temperature a row "plain", then one per verifier and policy. A way that cannot be says why."""
    rows: list[Verified] = []
    for temperature, top_p in SAMPLING:
        some = [Request(r.prompt_ids, replace(r.params, temperature=temperature, top_p=top_p)) for r in requests]
        rows += _at(temperature, target, drafter, some, setting, on_run)
    return rows


def _at(
    temperature: float, target: Target, drafter: Drafter, requests: list[Request], setting: Setting,
    on_run: Callable[[], None],
) -> list[Verified]:  # fmt: skip
    engines = {(PLAIN, ""): Engine(target, None, setting.options(requests))}
    for verifier, policy in ways(temperature):
        if not refusal(drafter, verifier, policy):
            engines[verifier, policy] = Engine(target, drafter, setting.of_way(requests, verifier, policy))
    runs: dict[tuple[str, str], list[Timed]] = {way: [] for way in engines}
    for repeat in range(setting.repeats):
        for way in in_turn(engines, repeat):
            runs[way].append(timed(engines[way], requests))
            on_run()
    plain = runs[PLAIN, ""]
    return [
        row_of((temperature, *way), requests, runs[way], plain)
        if way in runs
        else Verified(temperature, *way, refused=refusal(drafter, *way))
        for way in ((PLAIN, ""), *ways(temperature))
    ]


def row_of(
    way: tuple[float, str, str], requests: Sequence[Request], runs: Sequence[Timed], plain: Sequence[Timed]
) -> Verified:
    """One way's row. way: temperature, verifier, policy; runs, plain: of all repeats, in their order."""
    first = runs[0].completions
    rounds = [r for c in first for r in c.rounds]
    slots = max((len(r.drafted) for r in rounds), default=0)
    counted = acceptance([_drafted(r, c) for r, c in zip(requests, first, strict=True)], slots)
    return Verified(
        *way,
        tau=counted.tau,
        verified=sum(r.verified for r in rounds) / max(len(rounds), 1),
        rate=median_rate(runs),
        ratio=median_ratio(runs, plain),
        same=len(first) - differing(runs, plain[0].completions),
        unsteady=differing(runs, first),
        sequences=len(first),
        drafted=sum(len(r.drafted) for r in rounds),
        accepted=sum(r.accepted for r in rounds),
        rejected=sum(r.accepted < r.verified for r in rounds),
    )


def _drafted(request: Request, done: Completion) -> Drafted:
    return Drafted("", done.rounds, len(request.prompt_ids) + len(done.token_ids) - 1)


def as_lines(rows: Sequence[Verified]) -> list[str]:
    """At most 80 columns."""
    lines = [f"{'':<30}{'tau':>6}{'verified':>9}{'tokens/s':>9}{'x plain':>8}{'same output':>16}"]
    for row in rows:
        name = f"T {row.temperature:g} {row.verifier} {row.policy}".strip()
        if row.refused:
            lines.append(f"{name:<32}refused: {row.refused}")
            continue
        same = row.verdict if row.verifier != PLAIN or row.wrong else ""
        lines.append(f"{name:<30}{row.tau:>6.2f}{row.verified:>9.2f}{row.rate:>9.1f}{row.ratio:>8.2f}{same:>16}")
    if any(row.verdict == "inconclusive" for row in rows if not row.refused and row.verifier != PLAIN):
        lines.append("inconclusive: nothing was drafted, accepted or rejected; raise --limit")
    return lines
