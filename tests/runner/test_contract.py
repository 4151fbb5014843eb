"""The reproducibility contract: ids and fp32 log-probabilities are the same floats whatever the rest of the run
does."""

from __future__ import annotations

import random

import pytest
import torch

from dspark.contracts import DsparkError, Request, SamplingParams
from dspark.runner import Engine, EngineOptions
from dspark.runner.curve import CapacityCurve
from dspark.slot_maps import SlotMap
from tests.runner.conftest import counts, make_drafter, make_requests, make_target, outputs

SHAPES = [
    {"temperature": 0.9},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.0},
]


def engine(target, drafter=None, **options) -> Engine:
    return Engine(target, drafter, EngineOptions(**options))


def assert_speculated(completions) -> None:
    drafted, accepted, rejected = counts(completions)
    assert min(drafted, accepted, rejected) > 0, f"inconclusive: {drafted=} {accepted=} {rejected=}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_coupled_speculation_is_the_targets_own_sample(target, drafter, shape) -> None:
    requests = make_requests(12, **shape)
    plain = engine(target).generate(requests)
    speculative = engine(target, drafter).generate(requests)
    assert_speculated(speculative)
    assert outputs(speculative) == outputs(plain)


def test_greedy_verifier_equals_plain_greedy(target, drafter) -> None:
    requests = make_requests(12, temperature=0.0)
    speculative = engine(target, drafter, verifier="greedy").generate(requests)
    assert_speculated(speculative)
    assert outputs(speculative) == outputs(engine(target).generate(requests))


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
@pytest.mark.parametrize("with_drafter", [False, True], ids=["plain", "speculative"])
def test_batch_order_and_chunks_do_not_matter(target, drafter, verifier, with_drafter) -> None:
    requests = make_requests(9)
    model = drafter if with_drafter else None
    reference = engine(target, model, verifier=verifier).generate(requests)
    if with_drafter:
        assert_speculated(reference)
    for options in ({"max_batch": 1}, {"max_batch": 4, "prefill_chunk": 1}, {"prefill_chunk": 5}, {"kv_tokens": 61}):
        got = engine(target, model, verifier=verifier, **options).generate(requests)
        assert outputs(got) == outputs(reference), options
        assert [c.rounds for c in got] == [c.rounds for c in reference], options
    order = list(range(9))
    random.Random(3).shuffle(order)
    shuffled = engine(target, model, verifier=verifier).generate([requests[i] for i in order])
    assert outputs(shuffled) == [outputs(reference)[i] for i in order]


@pytest.mark.parametrize("verify_tokens", [0, 1, 2, 3, 4])
def test_verification_width_does_not_matter(target, drafter, verify_tokens) -> None:
    requests = make_requests(6)
    reference = outputs(engine(target).generate(requests))
    assert outputs(engine(target, drafter, verify_tokens=verify_tokens).generate(requests)) == reference
    capped = engine(target, drafter, verify_tokens=verify_tokens, commit_to_cap=True).generate(requests)
    assert outputs(capped) == reference


CURVE = CapacityCurve((1, 4, 8, 12, 40), (1.0, 1.2, 1.9, 2.0, 6.0))
SCHEDULES = [("threshold", 0.3), ("threshold", 0.6), ("early_stop", 0.0), ("lagged_global", 0.0), ("global", 0.0)]


def opinionated(drafter, spread: float = 3.0):
    """The same draft model with a confidence head that differs from slot to slot and token to token."""
    head = drafter.confidence_head
    torch.nn.init.normal_(head.proj.weight, std=spread, generator=torch.Generator().manual_seed(1))
    head.set_maps([SlotMap(1.0, 1.0 - 0.5 * k) for k in range(head.num_steps)])
    return drafter


@pytest.mark.parametrize(("policy", "least"), SCHEDULES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_schedules_do_not_matter(target, policy, least, temperature) -> None:
    """Lengths from 0 to the whole block in one batch, and not a bit of the output knows."""
    drafter, requests = opinionated(make_drafter(target)), make_requests(16, temperature=temperature, max_tokens=100)
    reference = outputs(engine(target).generate(requests))
    for more in ({}, {"max_batch": 3, "prefill_chunk": 5}, {"commit_to_cap": True}, {"verify_tokens": 2}):
        done = engine(target, drafter, policy=policy, threshold=least, curve=CURVE, **more).generate(requests)
        assert_speculated(done)
        assert outputs(done) == reference, more
        lengths = {r.verified for c in done for r in c.rounds}
        if more.get("commit_to_cap"):
            assert all(r.verified == len(r.drafted) for c in done for r in c.rounds)
        elif not more:
            assert len(lengths) >= 3, f"inconclusive: only the lengths {lengths}"
        assert max(lengths) <= more.get("verify_tokens", 4)


def test_a_threshold_under_rejection_is_the_requests_own_affair(target) -> None:
    """Batch-invariant without fixing the length: it looks at nothing outside of the request."""
    drafter, requests = opinionated(make_drafter(target)), make_requests(9)
    options = {"verifier": "rejection", "policy": "threshold", "threshold": 0.3}
    reference = engine(target, drafter, **options).generate(requests)
    assert_speculated(reference)
    assert len({r.verified for c in reference for r in c.rounds}) >= 3
    for more in ({"max_batch": 1}, {"max_batch": 4, "prefill_chunk": 3}):
        got = engine(target, drafter, **options, **more).generate(requests)
        assert outputs(got) == outputs(reference)
        assert [c.rounds for c in got] == [c.rounds for c in reference]


def test_a_position_that_is_drafted_again_is_drafted_with_other_noise() -> None:
    """Under rejection. A law that does not depend on the prefix: with the old noise every round would repeat the draft
    of a position, and a budget chosen from an earlier round's confidences would know it."""
    target = make_target(torch.float32)
    drafter = make_drafter(target, markov_rank=0, confidence_with_markov=False)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.zero_()
    params = SamplingParams(temperature=1.0, max_tokens=200, seq_seed=3)
    (done,) = engine(target, drafter, verifier="rejection").generate([Request((1, 2, 3), params)])
    drafted: dict[int, list[int]] = {}
    for r in done.rounds:
        for slot, token in enumerate(r.drafted):
            drafted.setdefault(r.anchor + slot + 1, []).append(token)
    again = [tokens for tokens in drafted.values() if len(tokens) > 1]
    same = sum(tokens[0] == tokens[1] for tokens in again)
    assert len(again) > 50
    assert same < len(again) / 4  # 1 in 13 by chance


def test_a_schedule_without_a_curve_verifies_all(target, drafter) -> None:
    for curve in (None, CapacityCurve((1, 64), (1.0, 1.0))):
        made = engine(target, drafter, policy="global", curve=curve)
        assert "dspark profile" in made.scheduler().told
        done = made.generate(make_requests(5))
        assert all(r.verified == len(r.drafted) for c in done for r in c.rounds)


def test_schedules_that_would_change_the_law_are_refused(target) -> None:
    with pytest.raises(DsparkError, match=r"global expects the coupled.*lagged_global or early_stop"):
        EngineOptions(verifier="rejection", policy="global")
    knowing = make_drafter(target, confidence_with_law=True)
    for policy in ("threshold", "early_stop", "lagged_global"):
        with pytest.raises(DsparkError, match="do not know the drafted token"):
            engine(target, knowing, verifier="rejection", policy=policy)
        engine(target, knowing, policy=policy)
    headless = make_drafter(target, confidence_head=False, confidence_with_markov=False)
    with pytest.raises(DsparkError, match="with a confidence head"):
        engine(target, headless, policy="threshold")
    for wrong in ({"policy": "best"}, {"policy": "threshold", "threshold": 1.5}):
        with pytest.raises(DsparkError, match="expected a"):
            EngineOptions(**wrong)


def test_drafters_are_interchangeable(target) -> None:
    requests = make_requests(6)
    reference = outputs(engine(target).generate(requests))
    for changes in ({"seed": 9}, {"markov_head": "gated"}, {"markov_rank": 0, "confidence_with_markov": False}):
        assert outputs(engine(target, make_drafter(target, **changes)).generate(requests)) == reference
    reduced = make_drafter(target, draft_ids=[0, 2, 3, 7, 8, 11])
    got = engine(target, reduced).generate(requests)
    assert_speculated(got)
    assert outputs(got) == reference


MAPS = {
    "none": SlotMap(),
    "temperature": SlotMap(1.7),
    "platt": SlotMap(0.8, -0.4),
    "isotonic": SlotMap(knots=((-0.5, 0.1), (0.0, 0.4), (0.2, 0.9))),
}


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("chosen", MAPS)
def test_recorded_confidences_are_what_the_model_says_of_the_finished_sequence(target, fusion, chosen) -> None:
    """Through prefill chunks, rejected drafts and reused rows, the draft model saw the features a single pass gives; by
    each kind of calibration."""
    drafter = make_drafter(target, input_fusion=fusion)
    drafter.confidence_head.set_maps([MAPS[chosen]] * 4)
    completions = engine(target, drafter, max_batch=3, prefill_chunk=4).generate(make_requests(7))
    assert_speculated(completions)
    head, slots = drafter.confidence_head, drafter.config.num_predictions
    for request, completion in zip(make_requests(7), completions, strict=True):
        ids = torch.tensor([*request.prompt_ids, *completion.token_ids])
        rounds = completion.rounds
        anchors = torch.tensor([r.anchor for r in rounds])
        drafted = torch.tensor([[*r.drafted, *[0] * (slots - len(r.drafted))] for r in rounds])
        with torch.inference_mode():
            _, features, _ = target.forward_sequences([ids], (0, 2))
            context = drafter.encode(features, torch.arange(len(ids)))
            begin = torch.zeros_like(anchors)
            out = drafter.teacher_forced(ids[anchors], anchors, drafted, context, begin, anchors)
        for r, logits in zip(rounds, out.confidence_logits.tolist(), strict=True):
            n = len(r.drafted)
            wanted = tuple(m.rate(z) for m, z in zip(head.maps[:n], logits[:n], strict=True))
            assert r.confidences == wanted


def test_score_gives_the_samplers_bits(target, drafter) -> None:
    requests = make_requests(6, temperature=0.7, top_p=0.9)
    scorer = engine(target)
    for request, done in zip(requests, engine(target, drafter).generate(requests), strict=True):
        logprobs, raw = scorer.score(request.prompt_ids, done.token_ids, request.params)
        assert torch.equal(logprobs, torch.tensor(done.logprobs))
        assert torch.equal(raw, torch.tensor(done.raw_logprobs))


def test_thread_count_does_not_matter(target, drafter) -> None:
    requests = make_requests(5)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = outputs(engine(target, drafter).generate(requests))
        torch.set_num_threads(2)
        two = outputs(engine(target, drafter).generate(requests))
    finally:
        torch.set_num_threads(threads)
    assert one == two


def test_stop_inside_an_accepted_run_ends_the_sequence() -> None:
    target = make_target(torch.float32)
    drafter = make_drafter(target)
    requests = make_requests(20, stop_ids=(3, 4, 5), max_tokens=40)
    plain = engine(target).generate(requests)
    speculative = engine(target, drafter).generate(requests)
    assert outputs(plain) == outputs(speculative)
    stopped = [c for c in speculative if c.finish_reason == "stop"]
    assert any(c.rounds and c.rounds[-1].accepted == len(c.rounds[-1].drafted) for c in stopped)
    for completion in speculative:
        assert not set(completion.token_ids[:-1]) & {3, 4, 5}
        ended = completion.token_ids[-1] in (3, 4, 5)
        assert completion.finish_reason == ("stop" if ended else "length")


def test_budget_is_exact_and_rounds_add_up(target, drafter) -> None:
    for budget in (1, 2, 3, 5, 6):
        for done in engine(target, drafter).generate(make_requests(5, max_tokens=budget)):
            assert len(done.token_ids) == budget == len(done.logprobs) == len(done.raw_logprobs)
            # The first token comes from the prompt's own pass; a round adds its accepted drafts and one more; a last
            # single token is produced without a draft.
            added = sum(r.accepted + 1 for r in done.rounds)
            assert budget - 1 - added in (0, 1)


def test_logprobs_are_finite_and_not_positive(target, drafter) -> None:
    for done in engine(target, drafter).generate(make_requests(5, top_k=3)):
        assert all(-1e9 < value <= 0.0 for value in (*done.logprobs, *done.raw_logprobs))


def test_user_mistakes_are_said() -> None:
    target = make_target(torch.float32)
    with pytest.raises(DsparkError, match="verify_tokens"):
        engine(target, make_drafter(target), verify_tokens=5)
    with pytest.raises(DsparkError, match="temperature 0"):
        engine(target, verifier="greedy").generate(make_requests(1))
    with pytest.raises(DsparkError, match="prompt \\+ max_tokens"):
        engine(target).generate([Request((1,) * 250, SamplingParams(max_tokens=50))])
    with pytest.raises(DsparkError, match="verifier"):
        EngineOptions(verifier="typical")
