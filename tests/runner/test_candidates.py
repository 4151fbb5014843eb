"""Draft models with candidates (and every other option) under all three verifiers: the contract holds, and the law the
rejection verifier is handed is the one the tokens were drawn from."""

from __future__ import annotations

import pytest
import torch

from dspark import noise, ops
from dspark.drafter.model import Drafter
from dspark.runner import Engine, EngineOptions
from dspark.runner.draft import DraftStage
from dspark.runner.sequence import Sequence
from dspark.runner.verify import SamplingRows
from dspark.target.decoder import Target
from tests.runner.conftest import counts, make_drafter, make_requests, make_target, outputs

KEPT = 3
CHOICES = {
    "candidates": {"candidates": KEPT},
    "options": {"candidates": KEPT, "convolution": True, "layer_fusion": True, "num_layers": 2, "markov_head": "pair"},
    "reduced": {"candidates": KEPT, "draft_ids": [0, 2, 3, 4, 7, 8, 9, 11], "confidence_with_law": True},
}
SHAPES = [{"temperature": 0.9}, {"temperature": 1.0, "top_k": 2}, {"temperature": 0.8, "top_p": 0.7, "min_p": 0.05}]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def target(request: pytest.FixtureRequest) -> Target:
    return make_target(request.param, hidden=32)


@pytest.fixture(scope="module", params=CHOICES)
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    return make_drafter(target, **CHOICES[request.param])


def run(target: Target, drafter: Drafter | None, requests: list, **options: object) -> list:
    return Engine(target, drafter, EngineOptions(**options)).generate(requests)


def assert_speculated(completions: list) -> None:
    drafted, accepted, rejected = counts(completions)
    assert min(drafted, accepted, rejected) > 0, f"inconclusive: {drafted=} {accepted=} {rejected=}"


@pytest.mark.parametrize("verifier", ["coupled", "greedy"])
def test_speculation_is_the_targets_own_sample(target: Target, drafter: Drafter, verifier: str) -> None:
    for shape in SHAPES if verifier == "coupled" else [{"temperature": 0.0}]:
        requests = make_requests(10, **shape)
        speculative = run(target, drafter, requests, verifier=verifier)
        assert_speculated(speculative)
        assert outputs(speculative) == outputs(run(target, None, requests))


@pytest.mark.parametrize("verifier", ["coupled", "rejection", "greedy"])
def test_batch_order_and_chunks_do_not_matter(target: Target, drafter: Drafter, verifier: str) -> None:
    requests = make_requests(6, temperature=0.0 if verifier == "greedy" else 0.9, max_tokens=13)
    reference = run(target, drafter, requests, verifier=verifier)
    assert_speculated(reference)
    for options in ({"max_batch": 1}, {"max_batch": 4, "prefill_chunk": 2}):
        got = run(target, drafter, requests, verifier=verifier, **options)
        assert outputs(got) == outputs(reference), options
        assert [c.rounds for c in got] == [c.rounds for c in reference], options


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_law_handed_over_is_the_one_drawn_from(target: Target, drafter: Drafter, shape: dict) -> None:
    """Every law: on the candidates alone, and to the last bit the shaped logits of the finished block, from which the
    keyed draw gives the token again."""
    laws, tokens, sampling, anchors = drafted(target, drafter, shape)
    assert bool(((laws > 0).sum(dim=-1) <= KEPT).all())
    assert bool((laws.sum(dim=-1) - 1.0).abs().max() < 1e-5)
    requests, slots = laws.shape[:2]
    for slot in range(slots):
        law, stream = laws[:, slot].contiguous(), noise.draft_stream(slot)
        drawn = ops.gumbel_argmax(law, sampling.seeds, stream, anchors + slot + 1, drafter.draft_ids)
        assert torch.equal(drafter.vocab_ids(drawn), tokens[:, slot])
    columns = drafter.to_columns(tokens)
    assert bool((laws.gather(-1, columns[..., None]) > 0).all())
    logits = block_logits(target, drafter, shape, tokens)
    assert bool((logits.isfinite().sum(dim=-1) == KEPT).all())
    each = sampling.repeat(torch.full((requests,), slots))
    assert torch.equal(each.shape(logits.flatten(0, 1)).view(laws.shape), laws)


def prompts(shape: dict) -> list:
    """Prompts of two tokens at least: the last is the anchor, those before it the context."""
    return [request for request in make_requests(12, **shape) if len(request.prompt_ids) > 1]


def packed(target: Target, requests: list) -> tuple[torch.Tensor, ...]:
    """Features and positions of all prompts, begin and anchor of each."""
    ids = [torch.tensor(request.prompt_ids) for request in requests]
    _, features, offsets = target.forward_sequences(ids, (0, 2))
    anchors = torch.tensor([len(i) - 1 for i in ids])
    return features, torch.cat([torch.arange(len(i)) for i in ids]), offsets[:-1], anchors


@torch.inference_mode()
def drafted(target: Target, drafter: Drafter, shape: dict) -> tuple:
    """One round of drafts after each prompt: laws [R,P,V'], tokens [R,P], sampling, anchors [R]."""
    requests = prompts(shape)
    features, positions, begin, anchors = packed(target, requests)
    stage = DraftStage(drafter, len(features), "rejection", drafter.config.num_predictions)
    stage.commit(features, positions, torch.arange(len(features)))
    sequences = [Sequence(i, request, int(base)) for i, (request, base) in enumerate(zip(requests, begin, strict=True))]
    sampling = SamplingRows.of([request.params for request in requests])
    drafts = stage.propose(sequences, sampling)
    return drafts.probs, torch.tensor([p.token_ids for p in drafts.predictions]), sampling, anchors


@torch.inference_mode()
def block_logits(target: Target, drafter: Drafter, shape: dict, tokens: torch.Tensor) -> torch.Tensor:
    requests = prompts(shape)
    features, positions, begin, anchors = packed(target, requests)
    anchor_ids = torch.tensor([request.prompt_ids[-1] for request in requests])
    context = drafter.encode(features, positions)
    return drafter.teacher_forced(anchor_ids, anchors, tokens, context, begin, begin + anchors).logits
