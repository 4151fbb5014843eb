"""Requests that come while others run: each is answered as if it had been alone."""

from __future__ import annotations

import pytest
import torch

from dspark.contracts import Completion, DsparkError
from dspark.drafter.model import Drafter
from dspark.runner import Engine, EngineOptions
from dspark.runner.lookup import Lookup
from dspark.target.decoder import Target
from tests.runner.conftest import counts, make_requests, make_target, outputs


def served(engine: Engine, waves: list[list], every: int) -> list[Completion]:
    """A wave of requests every so many rounds; all completions by index."""
    run, done, rounds = engine.open(), {}, 0
    with torch.inference_mode():
        while waves or run.busy:
            if waves and (rounds % every == 0 or not run.busy):
                run.submit(waves.pop(0))
            for sequence in run.round():
                done[sequence.index] = sequence.completion()
            rounds += 1
    return [done[i] for i in range(len(done))]


@pytest.mark.parametrize("every", [1, 3, 40])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "speculative"])
def test_whoever_comes_when(target: Target, drafter: Drafter, every: int, drafts: bool) -> None:
    requests = make_requests(14)
    alone = [c for r in requests for c in Engine(target).generate([r])]
    engine = Engine(target, drafter if drafts else None, EngineOptions(max_batch=4, kv_tokens=180, prefill_chunk=7))
    waves = [requests[i : i + 3] for i in range(0, len(requests), 3)]
    done = served(engine, waves, every)
    assert outputs(done) == outputs(alone)
    assert all(counts(done)) == drafts


def test_indices_go_on_and_a_lookup_sees_all(target: Target) -> None:
    engine = Engine(target, None, EngineOptions(max_batch=2), Lookup(3))
    run = engine.open()
    first, second = make_requests(5)[:2], make_requests(5)[2:]
    assert run.submit(first) == [0, 1]
    assert run.submit(second) == [2, 3, 4]
    done = {}
    with torch.inference_mode():
        while run.busy:
            done |= {s.index: s.completion() for s in run.round()}
    assert outputs([done[i] for i in range(5)]) == outputs(Engine(target).generate([*first, *second]))


def test_one_that_cannot_be_finished_is_refused_and_nothing_is_taken(target: Target) -> None:
    run = Engine(target, None, EngineOptions(kv_tokens=64)).open()
    good, bad = make_requests(1), make_requests(1, max_tokens=100)
    with pytest.raises(DsparkError, match=r"request 1: expected prompt \+ max_tokens <= 64"):
        run.submit([*good, *bad])
    assert not run.busy
    assert run.submit(good) == [0]


def test_rounds_without_requests_are_nothing() -> None:
    run = Engine(make_target(torch.float32)).open()
    assert not run.busy
    assert run.submit([]) == []
    assert run.round() == []


def test_a_run_made_for_less_refuses_what_would_wait_for_good(target: Target) -> None:
    run = Engine(target).begin(make_requests(1, max_tokens=4))
    with pytest.raises(DsparkError, match=r"request 0: expected prompt \+ max_tokens <= .*Engine.open"):
        run.submit(make_requests(1, max_tokens=40))
    with torch.inference_mode():
        while run.busy:
            run.round()
