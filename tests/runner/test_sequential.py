"""A sequential draft model (MTP) in the runner's place of the parallel one: the same contract, under every verifier."""

from __future__ import annotations

import pytest
import torch

from dspark.drafter.model import Drafter
from dspark.runner import Engine, EngineOptions
from dspark.slot_maps import SlotMap
from dspark.target.decoder import Target
from tests.runner.conftest import counts, make_drafter, make_requests, outputs


def make_mtp(target: Target, **fields: object) -> Drafter:
    rest = {"markov_rank": 0, "confidence_with_markov": False} | fields
    return make_drafter(target, architecture="mtp", num_layers=4, **rest)


def run(target: Target, drafter: Drafter | None, requests: list, **options: object) -> list:
    done = Engine(target, drafter, EngineOptions(**options)).generate(requests)
    if drafter is not None and options.get("verify_tokens") != 0:
        drafted, accepted, rejected = counts(done)
        assert min(drafted, accepted, rejected) > 0, f"inconclusive: {drafted=} {accepted=} {rejected=}"
    return done


@pytest.mark.parametrize("verifier", ["coupled", "greedy"])
def test_speculation_is_the_targets_own_text(target, verifier) -> None:
    requests = make_requests(12, temperature=0.0 if verifier == "greedy" else 0.9)
    plain = outputs(run(target, None, requests, verifier=verifier))
    for fields in ({}, {"draft_ids": [0, 2, 3, 7, 8, 11]}, {"markov_rank": 4, "markov_head": "rnn"}):
        assert outputs(run(target, make_mtp(target, **fields), requests, verifier=verifier)) == plain, fields


@pytest.mark.parametrize("width", [0, 1, 2, 3, 4])
def test_verification_width_does_not_matter(target, width) -> None:
    requests = make_requests(8)
    plain = outputs(run(target, None, requests))
    for cap in (False, True):
        assert outputs(run(target, make_mtp(target), requests, verify_tokens=width, commit_to_cap=cap)) == plain


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_batch_order_and_chunks_do_not_matter(target, verifier) -> None:
    requests, drafter = make_requests(7, max_tokens=11), make_mtp(target)
    reference = run(target, drafter, requests, verifier=verifier)
    for options in ({"max_batch": 1}, {"max_batch": 4, "prefill_chunk": 3}, {"kv_tokens": 50}):
        got = run(target, drafter, requests, verifier=verifier, **options)
        assert outputs(got) == outputs(reference), options
        assert [c.rounds for c in got] == [c.rounds for c in reference], options
    back = run(target, drafter, requests[::-1], verifier=verifier)
    assert outputs(back) == outputs(reference)[::-1]


def test_recorded_confidences_are_what_the_model_says_of_the_finished_sequence(target) -> None:
    """Through prefill chunks, rejected drafts and reused rows, its blocks started from the features a single pass
    gives."""
    drafter, requests = make_mtp(target), make_requests(7)
    for request, done in zip(requests, run(target, drafter, requests, max_batch=3, prefill_chunk=4), strict=True):
        ids = torch.tensor([*request.prompt_ids, *done.token_ids])
        anchors = torch.tensor([r.anchor for r in done.rounds])
        drafted = torch.tensor([[*r.drafted, *[0] * (4 - len(r.drafted))] for r in done.rounds])
        with torch.inference_mode():
            _, features, _ = target.forward_sequences([ids], (0, 2))
            context, begin = drafter.encode(features, torch.arange(len(ids))), torch.zeros_like(anchors)
            out = drafter.teacher_forced(ids[anchors], anchors, drafted, context, begin, anchors)
        for r, logits in zip(done.rounds, out.confidence_logits.tolist(), strict=True):
            assert r.confidences == tuple(SlotMap().rate(z) for z in logits[: len(r.drafted)])
