"""`bench lookup`: numbers by hand, and every way beside plain decoding."""

from __future__ import annotations

import pytest
import torch

from dspark.bench import looking_up
from dspark.bench.looking_up import BOTH, LEARNED, LOOKUP, PLAIN, Setting, as_lines, bench_lookup, engine_of, row_of
from dspark.bench.timed import Timed
from dspark.contracts import Completion, Request, Round, SamplingParams
from dspark.runner import EngineOptions
from dspark.runner.curve import CapacityCurve
from tests.bench.conftest import narrow
from tests.runner.conftest import VOCAB, make_drafter, make_target

CURVE = CapacityCurve((1, 8, 64), (1.0, 1.1, 2.0), (1, 8), (0.1, 0.2))


def epochs(prompts: int = 3, each: int = 3) -> list[list[Request]]:
    found = []
    for epoch in range(2):
        seeds = iter(range(100 * epoch, 200))
        found.append([Request((i, 3, 5, i + 1), SamplingParams(max_tokens=30, seq_seed=next(seeds)))
                      for i in range(prompts) for _ in range(each)])  # fmt: skip
    return found


def completion(tokens: tuple[int, ...], *rounds: Round) -> Completion:
    return Completion(tokens, (-1.0,) * len(tokens), (-1.0,) * len(tokens), "stop", rounds, 0)


def test_a_row_by_hand() -> None:
    """A prompt of 3; the first token comes with it, at 3. A pass without drafts (4), one of two drafts, one of which is
    accepted (5, 6), one whose single draft is the stop token (7): four tokens in three passes."""
    rounds = Round(4, (5, 9), 2, 1, (), "lookup"), Round(6, (7,), 1, 1)
    done, plain = completion((3, 4, 5, 6, 7), *rounds), completion((3, 4, 5, 6, 7))
    fast, slow = [Timed([done], 0.5, 0.5)], [Timed([plain], 2.0, 2.0)]
    request = Request((1, 2, 3), SamplingParams(stop_ids=(7,)))
    row = row_of((0.2, 1, BOTH), [request], fast, slow)
    assert row.tau == 4 / 3
    assert (row.accepted, row.verified, row.by_lookup) == (2 / 3, 1.0, 0.5)
    assert (row.rate, row.ratio, row.verdict) == (10.0, 4.0, "yes")
    other = row_of((0.2, 1, BOTH), [request], [*fast, Timed([completion((3, 4))], 1.0, 1.0)], slow * 2)
    assert (other.wrong, other.verdict) == (1, "1 differ")
    nothing = row_of((0.2, 1, PLAIN), [request], slow, slow)
    assert (nothing.tau, nothing.ratio, nothing.verdict) == (1.0, 1.0, "inconclusive")


def test_every_way_is_plain_decoding_and_the_last_epoch_helps() -> None:
    target = make_target(torch.float32, vocab=VOCAB)
    ran: list[int] = []
    options = EngineOptions(max_batch=4, policy="global", curve=CURVE)
    rows = bench_lookup(target, make_drafter(target), epochs(), Setting(options, 3, 2), lambda: ran.append(1))
    assert len(ran) == 2 * 2 * 2 * 4
    assert [(r.temperature, r.epoch, r.way) for r in rows] == [
        (t, e, way) for t in (0.2, 1.0) for e in (1, 2) for way in (PLAIN, LEARNED, LOOKUP, BOTH)
    ]
    assert not any(row.wrong for row in rows)
    assert all(row.tau == pytest.approx(1 + row.accepted, abs=0.1) for row in rows)
    found = {(r.temperature, r.epoch, r.way): r for r in rows}
    assert found[0.2, 1, PLAIN].tau == found[1.0, 2, PLAIN].tau == 1.0
    assert found[0.2, 2, LOOKUP].tau > found[0.2, 1, LOOKUP].tau > 1.0
    assert (found[0.2, 1, LOOKUP].by_lookup, found[0.2, 1, LEARNED].by_lookup) == (1.0, 0.0)
    assert len(narrow("\n".join(as_lines(rows)))) >= 1 + len(rows)


def test_every_run_starts_with_an_empty_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warming up too: what it has seen is thrown away."""
    target, seen = make_target(torch.float32), []
    clocked = looking_up.clocked

    def noted(engine, requests):
        before = engine.lookup and engine.lookup.remembered
        seen.append((before, len(requests)))
        return clocked(engine, requests)

    monkeypatch.setattr(looking_up, "clocked", noted)
    monkeypatch.setattr(looking_up, "SAMPLING", ((0.2, 0.9),))
    bench_lookup(target, None, epochs(2, 2), Setting(EngineOptions(), 3, 2))
    once = [(None, 4), (None, 4), (0, 4), (4, 4)]
    assert seen == [(None, 1), (0, 1), *once, *once[2:], *once[:2]]


def test_plain_decoding_needs_no_policy() -> None:
    target = make_target(torch.float32)
    setting = Setting(EngineOptions(max_batch=2, policy="global", curve=CURVE), 3)
    plain = engine_of(PLAIN, target, make_drafter(target), setting)
    assert (plain.drafter, plain.lookup, plain.options.policy, plain.options.max_batch) == (None, None, "fixed", 2)
    both = engine_of(BOTH, target, make_drafter(target), setting)
    assert both.drafter is not None
    assert both.lookup is not None
