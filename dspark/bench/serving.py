"""The runner against another engine: tokens per second, time to the first token, long contexts, requests that arrive
over time, memory per cached token.

Every side answers the same prompts with the same number of tokens, in turn, there and back again from repeat to repeat;
a ratio is of two sides of one repeat. Checked in the same run: what must be plain decoding's output is, bit for bit,
and at temperature 0 the peer says what we say for as long as the two agree (bf16 rounds differently; how far is told).
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from dspark.bench.peers import Peer
from dspark.bench.roofline import Rates, token_bytes, work
from dspark.bench.timed import in_turn
from dspark.contracts import Completion, Request, SamplingParams
from dspark.drafter.model import Drafter
from dspark.runner import Engine, EngineOptions
from dspark.runner.curve import CapacityCurve
from dspark.runner.engine import Run
from dspark.runner.gate import Gate
from dspark.runner.lookup import Lookup
from dspark.scorecard.measure import bits
from dspark.target.decoder import Target

RECOMMENDED = (0.2, 0.9)  # temperature, top-p
GREEDY = (0.0, 1.0)
Three = tuple[float, float, float]  # minimum, median, maximum


@dataclass(frozen=True, slots=True)
class Way:
    """How our runner answers. law: temperature, top-p."""

    name: str
    law: tuple[float, float] = RECOMMENDED
    drafts: bool = False
    scheduled: bool = False
    lookup: int = 0


@dataclass(frozen=True, slots=True)
class Parts:
    """What there is to run. drafter, curve, peers: where there are some."""

    target: Target
    drafter: Drafter | None = None
    curve: CapacityCurve | None = None
    peers: tuple[Peer, ...] = ()

    def ways(self) -> list[Way]:
        found = [Way("plain"), Way("plain, greedy", GREEDY)]
        if self.drafter is not None:
            found += [Way("coupled", drafts=True), Way("greedy", GREEDY, drafts=True)]
        if self.drafter is not None and self.curve is not None:
            found += [
                Way("coupled, scheduled", drafts=True, scheduled=True),
                Way("greedy, scheduled", GREEDY, drafts=True, scheduled=True),
                Way("coupled, scheduled, lookup", drafts=True, scheduled=True, lookup=5),
            ]
        return found

    def engine(self, way: Way, batch: int, rows: int, gate: Gate | None = None) -> Engine:
        """One that has seen nothing, but for what drafting is worth here (gate)."""
        options = EngineOptions(
            max_batch=batch, kv_tokens=rows, policy="global" if way.scheduled else "fixed",
            curve=self.curve if way.scheduled else None, verifier="coupled" if way.law[0] else "greedy",
        )  # fmt: skip
        drafter = self.drafter if way.drafts else None
        engine = Engine(self.target, drafter, options, Lookup(way.lookup) if way.lookup else None)
        engine.gate = gate or engine.gate
        return engine


@dataclass(frozen=True, slots=True)
class Served:
    """Requests finished by our runner. first: seconds until each had its first token; passes: of the target."""

    completions: list[Completion]
    seconds: float
    passes: int
    first: list[float]

    @property
    def rate(self) -> float:
        return sum(len(c.token_ids) for c in self.completions) / self.seconds


@dataclass(frozen=True, slots=True)
class Row:
    """One side at one batch size. rate: tokens/s; ratios: to each peer of the same repeat, by name, and to "plain"
    decoding by us at the same law; roof: the time it took over the least time for the bytes and products of its
    passes (0: not ours); wrong: sequences that are not plain decoding's."""

    batch: int
    side: str
    rate: Three
    ratios: dict[str, Three] = field(default_factory=dict)
    tau: float = 0.0
    read_gb: float = 0.0
    gflop: float = 0.0
    least: float = 0.0
    roof: float = 0.0
    wrong: int = 0


def finish(engine: Engine, requests: Sequence[Request]) -> Served:
    """All of them, all submitted at once."""
    began = time.perf_counter()
    with torch.inference_mode():
        run, done, first, passes = engine.begin(list(requests)), dict[int, Completion](), dict[int, float](), 0
        while run.busy:
            for sequence in run.round():
                first.setdefault(sequence.index, time.perf_counter() - began)
                done[sequence.index] = sequence.completion()
            _note_first(run, first, time.perf_counter() - began)
            passes += 1
    order = range(len(requests))
    return Served([done[i] for i in order], time.perf_counter() - began, passes, [first[i] for i in order])


def _note_first(run: Run, first: dict[int, float], now: float) -> None:
    for sequence in run.running:
        if len(sequence.tokens) > sequence.prompt_length:
            first.setdefault(sequence.index, now)


def with_law(requests: Sequence[Request], law: tuple[float, float]) -> list[Request]:
    return [Request(r.prompt_ids, replace(r.params, temperature=law[0], top_p=law[1])) for r in requests]


def speeds(
    parts: Parts, requests: Sequence[Request], batch: int, repeats: int, rates: Rates,
    on_run: Callable[[], object] = lambda: None,
) -> list[Row]:  # fmt: skip
    """A row for each of our ways and each peer (at the recommended law, and at temperature 0), plain decoding first.
    requests: at least `batch` of them, without stop tokens."""
    ways, rows = parts.ways(), sum(len(r.prompt_ids) + r.params.max_tokens for r in requests)
    laws = {law: with_law(requests, law) for law in (RECOMMENDED, GREEDY)}
    ours: dict[Way, list[Served]] = {way: [] for way in ways}
    theirs: dict[tuple[str, tuple[float, float]], list[float]] = {}
    told: dict[str, list[tuple[int, ...]]] = {}

    def run_peer(peer: Peer, law: tuple[float, float]) -> None:
        answered = peer.answer(laws[law], batch)
        theirs.setdefault((peer.name, law), []).append(sum(map(len, answered.tokens)) / answered.seconds)
        if law == GREEDY:
            told[peer.name] = answered.tokens

    gates = {way: Gate() for way in ways}  # kept over the repeats, as a runner's that stays up

    def run_way(way: Way) -> None:
        ours[way].append(finish(parts.engine(way, batch, rows, gates[way]), laws[way.law]))

    turns: list[Callable[[], None]] = [lambda way=way: run_way(way) for way in ways]  # type: ignore[misc]
    turns += [lambda p=p, law=law: run_peer(p, law) for p in parts.peers for law in laws]  # type: ignore[misc]
    for way in ways:  # warm: kernels, packed weights
        finish(parts.engine(way, batch, rows, gates[way]), laws[way.law][:1])
    for peer in parts.peers:
        peer.answer(laws[RECOMMENDED][:1], batch)
    for repeat in range(repeats):
        for turn in in_turn(turns, repeat):
            turn()
            on_run()
    plain = {way.law: ours[way] for way in ways if not way.drafts}
    found = [_row(parts, batch, way, ours[way], plain[way.law], theirs, laws[way.law], rates) for way in ways]
    agreed = {name: agreement(tokens, plain[GREEDY][0].completions) for name, tokens in told.items()}
    for (name, law), peers_rates in theirs.items():
        side = name + (", greedy" if law == GREEDY else "")
        ratio = {"agrees": (agreed[name],) * 3} if law == GREEDY else {}
        found.append(Row(batch, side, _three(peers_rates), ratio))
    return found


def _row(
    parts: Parts, batch: int, way: Way, runs: Sequence[Served], plain: Sequence[Served],
    theirs: dict[tuple[str, tuple[float, float]], list[float]], requests: Sequence[Request], rates: Rates,
) -> Row:  # fmt: skip
    ratios = {name: _over(runs, peer) for (name, law), peer in theirs.items() if law == way.law}
    if way.drafts:
        ratios["plain"] = _over(runs, [p.rate for p in plain])
    first = runs[0]
    moved = work(parts.target, requests, first.completions, first.passes)
    least = moved.seconds(rates)
    rounds = [r for c in first.completions for r in c.rounds]
    wrong = sum(
        any(bits(run.completions[i]) != bits(one) for run in runs) for i, one in enumerate(plain[0].completions)
    )
    return Row(
        batch, way.name, _three([run.rate for run in runs]), ratios,
        tau=sum(r.accepted + 1 for r in rounds) / len(rounds) if rounds else 1.0,
        read_gb=moved.read / 1e9, gflop=moved.flops / 1e9, least=least,
        roof=statistics.median(run.seconds for run in runs) / least, wrong=wrong,
    )  # fmt: skip


def agreement(told: Sequence[tuple[int, ...]], ours: Sequence[Completion]) -> float:
    """Share of tokens before the first that differs, over all sequences."""
    same = total = 0
    for ids, completion in zip(told, ours, strict=True):
        pairs = list(zip(ids, completion.token_ids, strict=True))
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        total += len(pairs)
    return same / max(1, total)


@dataclass(frozen=True, slots=True)
class Context:
    """At one prompt length: seconds to the first token, then tokens/s of decoding, by side."""

    tokens: int
    batch: int
    first: dict[str, float]
    rate: dict[str, float]


def contexts(
    parts: Parts, prompts: Sequence[Sequence[int]], batch: int, new: int, repeats: int,
    on_run: Callable[[], object] = lambda: None,
) -> Context:  # fmt: skip
    """Of `batch` prompts of one length, at once, plain decoding. new: tokens decoded after the first."""
    one, more = (_greedy(prompts[:batch], count) for count in (1, new + 1))
    rows = sum(len(r.prompt_ids) + r.params.max_tokens for r in more)
    way, firsts, rates = Way("plain, greedy", GREEDY), dict[str, list[float]](), dict[str, list[float]]()

    def ours(requests: list[Request]) -> float:
        engine = parts.engine(way, batch, rows)
        return finish(replace_reuse(engine), requests).seconds

    sides: dict[str, Callable[[list[Request]], float]] = {"ours": ours}
    for peer in parts.peers:
        sides[peer.name] = lambda requests, peer=peer: peer.answer(requests, batch).seconds  # type: ignore[misc]
    for run in sides.values():
        run(_greedy([prompts[0][:8]], 2))  # warm
    for repeat in range(repeats):
        for name in in_turn(sides, repeat):
            first, whole = sides[name](one), sides[name](more)
            firsts.setdefault(name, []).append(first)
            rates.setdefault(name, []).append(batch * new / max(whole - first, 1e-9))
            on_run()
    middle = {name: statistics.median(values) for name, values in firsts.items()}
    return Context(len(prompts[0]), batch, middle, {name: statistics.median(values) for name, values in rates.items()})


def replace_reuse(engine: Engine) -> Engine:
    """Without copying what prompts share: prompts that were cut from one text would share nothing by right."""
    return Engine(engine.target, engine.drafter, replace(engine.options, reuse_prefixes=False), engine.lookup)


def _greedy(prompts: Sequence[Sequence[int]], count: int) -> list[Request]:
    return [Request(tuple(ids), SamplingParams(temperature=0.0, max_tokens=count, seq_seed=i))
            for i, ids in enumerate(prompts)]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Memory:
    """cached: tokens whose keys and values came to be held; exact: bytes of these alone; grown: what the process grew
    by meanwhile, counted by the kernel."""

    cached: int
    exact: int
    grown: int

    @property
    def ratio(self) -> float:
        return self.grown / self.exact


def memory(target: Target, prompts: Sequence[Sequence[int]]) -> Memory:
    """From after the first pass, when what a pass needs beside the cache is there, until all prompts are held."""
    passes = sum(map(len, prompts)) // EngineOptions().prefill_chunk + 3  # until the last prompt is read
    requests = _greedy(prompts, passes)
    rows = sum(len(r.prompt_ids) + passes for r in requests)
    engine = Engine(target, None, EngineOptions(max_batch=len(requests), kv_tokens=rows, reuse_prefixes=False))
    gc.collect()
    seen: list[tuple[int, int]] = []  # cached, resident
    with torch.inference_mode():
        run = engine.begin(requests)
        while run.busy:
            run.round()
            seen.append((sum(s.cached for s in run.running), _resident()))
    (first, before), (most, held) = seen[0], max(seen)
    return Memory(most - first, (most - first) * token_bytes(target), held - before)


def _resident() -> int:
    """Bytes of this process in memory."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _over(runs: Sequence[Served], rates: Sequence[float]) -> Three:
    return _three([run.rate / other for run, other in zip(runs, rates, strict=True)])


def _three(values: Sequence[float]) -> Three:
    return min(values), statistics.median(values), max(values)
