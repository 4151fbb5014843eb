"""Plain decoding, the draft model, a lookup, and both, over two epochs of the same prompts: tokens per pass, tokens per
second, and whether the output is the same.

An epoch has several samples of every prompt, the second one other seeds; each run starts with an empty lookup, so the
first epoch shows what prompts and siblings give, and the second what the last trajectories give on top. All ways take
turns, there and back again; a speed is the median of the repeats, a ratio the median of those to plain decoding in the
same repeat. Every run's output is held against plain decoding's.
Left out on purpose: weights that move between the epochs, as in RL; there the second epoch is worth less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dspark.bench.timed import Timed, clocked, differing, in_turn, median_rate, median_ratio
from dspark.contracts import Completion, Request
from dspark.drafter.model import Drafter
from dspark.runner import Engine, EngineOptions
from dspark.runner.acceptance import Drafted, passes
from dspark.runner.lookup import Lookup
from dspark.target.decoder import Target

SAMPLING = ((0.2, 0.9), (1.0, 1.0))  # temperature, top-p
EPOCHS = 2
REPEATS = 3
PLAIN, LEARNED, LOOKUP, BOTH = "plain", "learned", "lookup", "both"


@dataclass(frozen=True, slots=True)
class LookedUp:
    """tau: tokens per pass of a request, the target's own included, passes without drafts too; accepted, verified:
    drafts per pass; by_lookup: the lookup's share of the accepted ones. rate: tokens/s; ratio: to plain decoding.
    wrong: sequences that are not plain decoding's in some repeat, of `sequences`. rejected: rounds with a rejection.
    """

    temperature: float
    epoch: int
    way: str
    tau: float
    accepted: float
    verified: float
    by_lookup: float
    rate: float
    ratio: float
    wrong: int
    sequences: int
    rejected: int

    @property
    def verdict(self) -> str:
        """yes, the number that differ, or inconclusive where nothing was accepted or rejected."""
        if self.wrong:
            return f"{self.wrong} differ"
        return "yes" if self.accepted and self.rejected else "inconclusive"


@dataclass(frozen=True, slots=True)
class Setting:
    """What every way has in common. options: of an engine that drafts; plain decoding takes the batch and the room from
    them. width: most drafts looked up in a round."""

    options: EngineOptions
    width: int
    repeats: int = REPEATS


def ways(drafter: Drafter | None) -> list[str]:
    """Those that there are the parts for."""
    return [PLAIN, LOOKUP] if drafter is None else [PLAIN, LEARNED, LOOKUP, BOTH]


def bench_lookup(
    target: Target, drafter: Drafter | None, epochs: Sequence[Sequence[Request]], setting: Setting,
    on_run: Callable[[], None] = lambda: None,
) -> list[LookedUp]:  # fmt: skip
    """Per temperature and epoch a row for each way, plain decoding first. epochs: the requests of each, whose
    temperature and top-p are set here."""
    rows: list[LookedUp] = []
    for temperature, top_p in SAMPLING:
        some = [[Request(r.prompt_ids, replace(r.params, temperature=temperature, top_p=top_p)) for r in requests]
                for requests in epochs]  # fmt: skip
        rows += _at(temperature, target, drafter, some, setting, on_run)
    return rows


def _at(
    temperature: float, target: Target, drafter: Drafter | None, epochs: list[list[Request]], setting: Setting,
    on_run: Callable[[], None],
) -> list[LookedUp]:  # fmt: skip
    runs: dict[tuple[int, str], list[Timed]] = {(e, way): [] for e in range(len(epochs)) for way in ways(drafter)}
    for way in ways(drafter):
        clocked(engine_of(way, target, drafter, setting), epochs[0][:1])  # warm
    for repeat in range(setting.repeats):
        for way in in_turn(ways(drafter), repeat):
            engine = engine_of(way, target, drafter, setting)  # with an empty lookup
            for e, requests in enumerate(epochs):
                runs[e, way].append(clocked(engine, requests))
                on_run()
    return [row_of((temperature, e + 1, way), epochs[e], found, runs[e, PLAIN]) for (e, way), found in runs.items()]


def engine_of(way: str, target: Target, drafter: Drafter | None, setting: Setting) -> Engine:
    """A runner that drafts one way, and has seen nothing."""
    model = drafter if way in (LEARNED, BOTH) else None
    lookup = Lookup(setting.width) if way in (LOOKUP, BOTH) else None
    drafting = setting.options
    plain = EngineOptions(max_batch=drafting.max_batch, kv_tokens=drafting.kv_tokens)
    return Engine(target, model, plain if way == PLAIN else drafting, lookup)


def row_of(
    way: tuple[float, int, str], requests: Sequence[Request], runs: Sequence[Timed], plain: Sequence[Timed]
) -> LookedUp:
    """One row. way: temperature, epoch, name; runs, plain: of all repeats, in their order."""
    first = runs[0].completions
    rounds = [r for c in first for r in c.rounds]
    tokens = sum(len(c.token_ids) - 1 for c in first)  # the first comes with the prompt
    count = sum(count_passes(r, c) for r, c in zip(requests, first, strict=True))
    accepted = sum(r.accepted for r in rounds)
    return LookedUp(
        *way,
        tau=tokens / max(count, 1),
        accepted=accepted / max(count, 1),
        verified=sum(r.verified for r in rounds) / max(count, 1),
        by_lookup=sum(r.accepted for r in rounds if r.source == "lookup") / max(accepted, 1),
        rate=median_rate(runs),
        ratio=median_ratio(runs, plain),
        wrong=differing(runs, plain[0].completions),
        sequences=len(first),
        rejected=sum(r.accepted < r.verified for r in rounds),
    )


def count_passes(request: Request, done: Completion) -> int:
    """Passes of the target that decoded a request, those without drafts too."""
    return passes(Drafted("", done.rounds, len(request.prompt_ids) + len(done.token_ids) - 1), len(done.token_ids))


def as_lines(rows: Sequence[LookedUp]) -> list[str]:
    """At most 80 columns."""
    lines = [f"{'':<22}{'tau':>6}{'accepted':>9}{'verified':>9}{'tokens/s':>9}{'x plain':>8}{'same output':>13}"]
    for row in rows:
        name = f"T {row.temperature:g} epoch {row.epoch} {row.way}"
        same = row.verdict if row.way != PLAIN or row.wrong else ""
        lines.append(
            f"{name:<22}{row.tau:>6.2f}{row.accepted:>9.2f}{row.verified:>9.2f}{row.rate:>9.1f}{row.ratio:>8.2f}"
            f"{same:>13}"
        )
    if any(row.verdict == "inconclusive" for row in rows if row.way != PLAIN):
        lines.append("inconclusive: nothing was accepted or rejected; raise --limit or --max_tokens")
    return lines
