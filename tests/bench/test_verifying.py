"""`bench verify`: numbers by hand, and every verifier with every policy beside plain decoding."""

from __future__ import annotations

import pytest
import torch

from dspark.bench import verifying
from dspark.bench.timed import Timed, in_turn, timed
from dspark.bench.verifying import Setting, Verified, as_lines, bench_verify, refusal, row_of, ways
from dspark.contracts import Completion, DsparkError, Request, Round, SamplingParams
from dspark.runner import Engine, EngineOptions
from dspark.runner.curve import CapacityCurve
from tests.bench.conftest import narrow
from tests.runner.conftest import make_drafter, make_requests, make_target

CURVE = CapacityCurve((1, 8, 64), (1.0, 1.2, 3.0), (1, 8), (0.1, 0.2))


def completion(tokens: tuple[int, ...], *rounds: Round) -> Completion:
    return Completion(tokens, (-1.0,) * len(tokens), (-1.0,) * len(tokens), "stop", rounds, 0)


def test_a_row_by_hand() -> None:
    """A prompt of 3 and a first token at 3. Round one: 2 of 3 accepted and one more, three tokens. Round two ends on a
    stop token that is its only, accepted, draft: one token, nothing of the target's own. 4 tokens in 2 rounds."""
    request = Request((1, 2, 3), SamplingParams(stop_ids=(9,)))
    whole, end = Round(3, (5, 6, 7), 3, 2), Round(6, (9,), 1, 1)
    done, plain = completion((4, 5, 6, 8, 9), whole, end), completion((4, 5, 6, 8, 9))
    fast = [Timed([done], seconds, seconds) for seconds in (1.0, 5.0, 0.5)]
    slow = [Timed([plain], seconds, seconds) for seconds in (2.0, 2.0, 2.0)]
    row = row_of((0.0, "greedy", "fixed"), [request], fast, slow)
    assert row.tau == 2.0  # 1 + accepted / rounds would be 2.5
    assert row.verified == 2.0
    assert row.rate == 5.0  # 5, 1 and 10 tokens/s
    assert row.ratio == 2.0  # 2, 0.4 and 4
    assert (row.drafted, row.accepted, row.rejected) == (4, 3, 1)
    assert (row.same, row.unsteady, row.sequences, row.verdict, row.wrong) == (1, 0, 1, "yes", False)


def test_a_run_that_once_differs_is_no_and_wins_over_inconclusive() -> None:
    request, good, bad = Request((1,), SamplingParams()), completion((4, 5)), completion((4, 6))
    plain = [Timed([good], 1.0, 1.0)] * 2
    once = row_of((0.2, "coupled", "fixed"), [request], [Timed([bad], 1.0, 1.0)] * 2, plain)
    assert (once.same, once.unsteady, once.wrong, once.verdict) == (0, 0, True, "no (1 of 1)")
    then = row_of((0.2, "rejection", "fixed"), [request], [plain[0], Timed([bad], 1.0, 1.0)], plain)
    assert (then.same, then.unsteady, then.wrong, then.verdict) == (0, 1, True, "unsteady (1)")
    quiet = row_of((0.2, "coupled", "fixed"), [request], plain, plain)
    assert (quiet.wrong, quiet.verdict) == (False, "inconclusive")
    free = Verified(0.2, "rejection", "fixed", sequences=3)
    assert not free.wrong  # samples of its own
    assert Verified(0.0, "rejection", "fixed", sequences=3).wrong


def test_all_verifiers_and_policies_are_tried() -> None:
    assert len(ways(0.0)) == 15
    assert len(ways(0.2)) == 10
    assert {v for v, _ in ways(0.2)} == {"coupled", "rejection"}


@pytest.mark.slow
@pytest.mark.parametrize("with_law", [False, True])
def test_every_way_is_plain_decoding_or_says_why_not(with_law: bool) -> None:
    target = make_target(torch.float32)
    drafter = make_drafter(target, confidence_with_law=with_law)
    ran: list[int] = []
    setting = Setting(CURVE, 0.3, max_batch=4, repeats=2)
    rows = bench_verify(target, drafter, make_requests(6), setting, lambda: ran.append(1))
    assert [r.temperature for r in rows] == [0.0] * 16 + [0.2] * 11 + [1.0] * 11
    refused = {(r.verifier, r.policy, r.refused) for r in rows if r.refused}
    wanted = {("rejection", "global", "changes the law")}
    if with_law:
        policies = ("threshold", "early_stop", "lagged_global")
        wanted |= {("rejection", policy, "the head knows the drafted token") for policy in policies}
    assert refused == wanted
    run = [r for r in rows if not r.refused]
    assert len(ran) == 2 * len(run)
    for row in run:
        assert not row.wrong, row
        if row.verifier in ("greedy", "coupled") and row.policy == "fixed" and row.temperature:
            assert row.verdict == "yes", row
            assert 1.0 < row.tau <= 5.0
        assert row.rate > 0 < row.ratio
    plain = [r for r in rows if r.verifier == "plain"]
    assert {(r.tau, r.verified, r.ratio, r.drafted) for r in plain} == {(1.0, 0.0, 1.0, 0)}
    lines = narrow("\n".join(as_lines(rows)))
    assert len(lines) == 1 + len(rows)
    assert sum("refused: changes the law" in line for line in lines) == 3


def test_each_repeat_runs_every_way_once_and_then_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain, greedy, coupled and rejection with the fixed policy at temperature 0, all equal to plain."""
    monkeypatch.setattr(verifying, "SAMPLING", ((0.0, 1.0),))
    monkeypatch.setattr(verifying, "POLICIES", ("fixed",))
    order: list[tuple[str, bool]] = []

    def noted(engine: Engine, requests: list[Request]) -> Timed:
        order.append((engine.options.verifier, engine.drafter is not None))
        return timed(engine, requests)

    monkeypatch.setattr(verifying, "timed", noted)
    target = make_target(torch.float32)
    rows = bench_verify(target, make_drafter(target), make_requests(5), Setting(CURVE, 0.3, 4))
    once = [("coupled", False), ("greedy", True), ("coupled", True), ("rejection", True)]
    assert order == once + once[::-1] + once
    assert [row.verdict for row in rows[1:]] == ["yes"] * 3
    assert rows[1].tau == rows[2].tau == rows[3].tau > 1.0


def test_a_refusal_is_the_engines() -> None:
    """What is said in few words, the engine says in many, of the same pairs."""
    target = make_target(torch.float32)
    for with_law in (False, True):
        drafter = make_drafter(target, confidence_with_law=with_law)
        for verifier, policy in ways(0.0):
            try:
                Engine(target, drafter, Setting(CURVE, 0.3, 4).of_way(make_requests(2), verifier, policy))
                accepted = True
            except DsparkError:
                accepted = False
            assert accepted == (refusal(drafter, verifier, policy) == "")


def test_time_of_users_is_that_of_their_rounds() -> None:
    """Four requests on two places: the sum lies between one and two times the seconds, and everything is done."""
    target = make_target(torch.float32)
    requests = make_requests(4)
    found = timed(Engine(target, None, EngineOptions(max_batch=2)), requests)
    assert found.seconds < found.user_seconds <= 2 * found.seconds
    assert found.completions == Engine(target).generate(requests)
    assert found.tokens == sum(len(c.token_ids) for c in found.completions)
    assert in_turn("abc", 0) == ["a", "b", "c"]
    assert in_turn("abc", 1) == ["c", "b", "a"]
