"""The draft model rests where drafting does not pay, is tried again now and then, and nothing of it shows."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.drafter.model import Drafter
from dspark.runner import Engine, EngineOptions
from dspark.runner.curve import CapacityCurve
from dspark.runner.gate import Gate, Worth
from dspark.target.decoder import Target
from tests.runner.conftest import counts, make_drafter, make_requests, outputs

DEAR = CapacityCurve((1, 1000), (1.0, 1.1), (1, 64), (9.0, 9.0))  # a row costs next to nothing, drafting nine passes
CHEAP = CapacityCurve((1, 1000), (1.0, 1.1), (1, 64), (1e-6, 1e-6))
STEEP = CapacityCurve((1, 1000), (1.0, 1000.0), (1, 64), (0.5, 0.5))


MODEL = np.array([True])


def said(ratio: float) -> Worth:
    return lambda requests, blocks, modelled: ratio


def pattern(gate: Gate, ratio: float, rounds: int, requests: int = 8) -> list[bool]:
    """Rounds in which the model was asked: each shows a block a request."""
    asked = []
    for _ in range(rounds):
        asked.append(gate.open(requests, said(ratio)))
        if asked[-1]:
            gate.learn(np.full((requests, 3), 0.5), MODEL.repeat(requests))
    return asked


def test_rests_are_longer_every_time_but_end() -> None:
    asked = pattern(Gate(), 0.7, 400)
    tried = [i for i, yes in enumerate(asked) if yes]
    assert tried == [0, 5, 22, 87, 344]
    assert sum(pattern(Gate(), 0.7, 10_000)) < 45  # rests have a longest


def test_a_few_blocks_are_seen_before_anything_is_concluded() -> None:
    assert [i for i, yes in enumerate(pattern(Gate(), 0.7, 30, requests=1)) if yes] == [*range(8), *range(12, 20)]


def test_what_pays_is_never_left_out_and_a_change_is_noticed() -> None:
    gate = Gate()
    assert all(pattern(gate, 1.3, 50))
    assert not all(pattern(gate, 0.2, 50))
    assert pattern(gate, 5.0, 600)[-1]
    assert all(pattern(gate, 5.0, 50))


def by_confidence(requests: int, blocks: np.ndarray, modelled: np.ndarray) -> float:
    return float(blocks[modelled].mean()) / 0.5 * (1.0 if requests == 1 else 0.4)


def test_after_a_rest_what_is_new_outweighs_what_is_old() -> None:
    """128 blocks of texts that were hard, then 8 at a time of texts that are easy."""
    gate = Gate()
    gate.learn(np.full((128, 3), 0.1), MODEL.repeat(128))
    asked = 0
    for _ in range(3000):
        if gate.open(1, by_confidence):
            gate.learn(np.full((1, 3), 0.9), MODEL)
            asked += 1
    assert gate.open(1, by_confidence)
    assert asked > 2000  # it was found out before the third rest


def test_one_bad_round_among_good_ones_is_no_reason() -> None:
    gate = Gate()
    for confidence in (0.9, 0.9, 0.9, 0.1):
        gate.learn(np.full((8, 3), confidence), MODEL.repeat(8))
    assert gate.open(1, by_confidence)


def test_a_size_that_was_never_tried_is_judged_by_the_blocks_of_others() -> None:
    gate = Gate()
    gate.learn(np.full((8, 3), 0.9), MODEL.repeat(8))
    assert gate.open(1, by_confidence)
    assert not gate.open(32, by_confidence)
    assert gate.open(1, by_confidence)


@pytest.mark.parametrize("policy", ["early_stop", "lagged_global", "global"])
@pytest.mark.parametrize("verifier", ["coupled", "greedy"])
def test_resting_changes_no_output(target: Target, drafter: Drafter, policy: str, verifier: str) -> None:
    requests = make_requests(9, **({"temperature": 0.0} if verifier == "greedy" else {}))
    plain = outputs(Engine(target, None, EngineOptions(max_batch=4)).generate(requests))
    found = {}
    for name, curve in {"dear": DEAR, "cheap": CHEAP, "steep": STEEP}.items():
        options = EngineOptions(verifier=verifier, max_batch=4, policy=policy, curve=curve)
        done = Engine(target, drafter, options).generate(requests)
        assert outputs(done) == plain
        found[name] = counts(done)
    assert 0 < found["dear"][0] < found["cheap"][0] / 2
    assert all(n > 0 for n in found["cheap"])


def test_whole_blocks_for_labels_are_always_drafted(target: Target, drafter: Drafter) -> None:
    """commit_to_cap records what a policy would have done on every round: no round may be missing."""
    options = EngineOptions(max_batch=4, policy="global", curve=DEAR, commit_to_cap=True)
    for completion in Engine(target, drafter, options).generate(make_requests(6)):
        written = len(completion.token_ids) - 1
        assert len(completion.rounds) >= written - sum(r.accepted for r in completion.rounds) - 1


@pytest.mark.parametrize("policy", ["early_stop", "lagged_global"])
def test_under_rejection_a_call_does_not_depend_on_the_one_before(target: Target, policy: str) -> None:
    drafter = make_drafter(target)
    options = EngineOptions(max_batch=4, policy=policy, curve=DEAR, verifier="rejection")
    engine, requests = Engine(target, drafter, options), make_requests(9)
    first = engine.generate(requests)
    assert counts(first)[1] > 0
    assert outputs(engine.generate(requests)) == outputs(first)


def test_the_next_call_need_not_find_out_again(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, drafter, EngineOptions(max_batch=4, policy="global", curve=DEAR))
    first, again = (counts(engine.generate(make_requests(9)))[0] for _ in range(2))
    assert 0 < again < first / 2
