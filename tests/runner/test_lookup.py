"""A lookup, the draft model, both in turn, or neither: not a bit of what comes out knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dspark.contracts import Completion, DraftedBy, DsparkError, Request, SamplingParams
from dspark.drafter.model import Drafter
from dspark.runner import Engine, EngineOptions
from dspark.runner.curve import CapacityCurve
from dspark.runner.lookup import Lookup, Rates, gain
from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.weights import random_weights
from tests.runner.conftest import VOCAB, counts, make_drafter, make_requests, make_target, outputs

WINDOW = 9
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
RING = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen2": RING, "Qwen3": {}, "Mistral": {"sliding_window": WINDOW},
    "Yoco": {"num_consumer_layers": 2, "sliding_window": WINDOW},
}  # fmt: skip
CURVE = CapacityCurve((1, 8, 24, 80), (1.0, 1.1, 1.5, 4.0), (1, 12), (0.2, 0.4))


def family(name: str, dtype: torch.dtype = torch.float32) -> Target:
    config = read_config({"architectures": [f"{name}ForCausalLM"], **SHAPE, **FAMILIES[name]})
    return Target(config, random_weights(config, 1, dtype, scale=0.35))


def drafter_of(target: Target, **fields: object) -> Drafter:
    return make_drafter(target, target_layer_ids=(0, 1), **fields)


def groups(count: int = 3, each: int = 4, **params: object) -> list[Request]:
    """Prompts of 1 to 24 tokens, several samples of each."""
    generator = torch.Generator().manual_seed(5)
    settings: dict = {"temperature": 0.7, "max_tokens": 40} | params
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (1, 24, 9, 17)[:count]]
    return [Request(tuple(p), SamplingParams(**settings, seq_seed=10 * i + j))
            for i, p in enumerate(prompts) for j in range(each)]  # fmt: skip


def by(source: DraftedBy, completions: Sequence[Completion]) -> tuple[int, int, int]:
    """(drafted, accepted, rejected) over the rounds of one drafter."""
    rounds = [r for c in completions for r in c.rounds if r.source == source]
    rejected = sum(r.accepted < r.verified for r in rounds)
    return sum(len(r.drafted) for r in rounds), sum(r.accepted for r in rounds), rejected


def assert_same(got: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    assert outputs(list(got)) == outputs(list(wanted))
    for a, b in zip(got, wanted, strict=True):
        for name in ("token_ids", "logprobs", "raw_logprobs"):
            assert torch.equal(torch.tensor(getattr(a, name)), torch.tensor(getattr(b, name)))


def run(
    target: Target, drafter: Drafter | None, lookup: Lookup | None, some: list[Request], **options: Any
) -> list[Completion]:
    return Engine(target, drafter, EngineOptions(**options), lookup=lookup).generate(some)


BATCHES: list[dict[str, Any]] = [{}, {"max_batch": 1}, {"max_batch": 3, "prefill_chunk": 5}, {"prefill_chunk": 1}]


@pytest.mark.parametrize("options", BATCHES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_who_drafts_does_not_matter(name: str, temperature: float, options: dict[str, Any]) -> None:
    target = family(name, torch.bfloat16 if name == "Qwen3" else torch.float32)
    drafter, requests = drafter_of(target), groups(temperature=temperature)
    if temperature == 0:  # samples of one prompt are equal then, and leave a random draft model little to do
        requests = [*make_requests(16, temperature=0.0, max_tokens=30), *requests[::2]]
    verifier = "greedy" if temperature == 0 else "coupled"
    plain = run(target, None, None, requests)
    both = run(target, drafter, Lookup(3), requests, verifier=verifier, **options)
    assert_same(both, plain)
    assert min(*by("lookup", both), *by("drafter", both)) > 0
    alone = run(target, None, Lookup(3), requests, verifier=verifier, **options)
    assert_same(alone, plain)
    assert min(by("lookup", alone)) > 0 == by("drafter", alone)[0]
    if not options:
        learned = run(target, drafter, None, requests, verifier=verifier)
        assert_same(learned, plain)
        assert min(by("drafter", learned)) > 0 == by("lookup", learned)[0]


@pytest.mark.parametrize(("policy", "least"), [("threshold", 0.3), ("early_stop", 0.0), ("lagged_global", 0.0),
                                               ("global", 0.0)])  # fmt: skip
@pytest.mark.parametrize("head", [True, False], ids=["head", "headless"])
def test_schedules_weigh_both(policy: str, least: float, head: bool) -> None:
    """One with a confidence head, and one whose slots have nothing but their running acceptance."""
    target, requests = make_target(torch.float32), groups()
    drafter = make_drafter(target, confidence_head=head, confidence_with_markov=head)
    plain = run(target, None, None, requests)
    for model in (drafter, None):
        done = run(target, model, Lookup(6), requests, policy=policy, threshold=least, curve=CURVE)
        assert_same(done, plain)
        assert min(by("lookup", done)) > 0
        lengths = {(r.verified, len(r.drafted)) for c in done for r in c.rounds}
        assert any(verified < drafted for verified, drafted in lengths), "inconclusive: nothing was cut"
        assert all(len(r.confidences) == len(r.drafted) for c in done for r in c.rounds)


def test_the_draft_model_is_right_about_rounds_a_lookup_drafted() -> None:
    """Its context is written whoever drafted: what it proposes in a mixed run is what it would have proposed alone."""
    target, requests = make_target(torch.float32), groups()
    drafter = make_drafter(target)
    mixed = run(target, drafter, Lookup(3), requests)
    assert min(*by("lookup", mixed), *by("drafter", mixed)) > 0
    for request, done in zip(requests, mixed, strict=True):
        ids = torch.tensor([*request.prompt_ids, *done.token_ids])
        own = [r for r in done.rounds if r.source == "drafter"]
        if not own:
            continue
        anchors = torch.tensor([r.anchor for r in own])
        drafted = torch.tensor([[*r.drafted, *[0] * (4 - len(r.drafted))] for r in own])
        with torch.inference_mode():
            _, features, _ = target.forward_sequences([ids], (0, 2))
            context, begin = drafter.encode(features, torch.arange(len(ids))), torch.zeros_like(anchors)
            out = drafter.teacher_forced(ids[anchors], anchors, drafted, context, begin, anchors)
        assert drafter.confidence_head is not None
        for r, logits in zip(own, out.confidence_logits.tolist(), strict=True):
            maps = drafter.confidence_head.maps[: len(r.drafted)]
            assert r.confidences == tuple(m.rate(z) for m, z in zip(maps, logits, strict=False))


def test_a_reduced_draft_vocabulary_beside_a_lookup_of_all_ids() -> None:
    target, requests = make_target(torch.float32), groups(each=5)
    few = [0, 2, 3, 7, 8, 11]
    done = run(target, make_drafter(target, draft_ids=few), Lookup(3), requests)
    assert_same(done, run(target, None, None, requests))
    assert min(*by("lookup", done), *by("drafter", done)) > 0
    looked_up = {token for c in done for r in c.rounds if r.source == "lookup" for token in r.drafted[: r.accepted]}
    assert looked_up - set(few), "inconclusive: nothing outside the draft vocabulary was looked up"
    assert {0, VOCAB - 1} <= {token for c in done for r in c.rounds for token in r.drafted}, "the vocabulary's edges"


def test_prefixes_are_reused_beside_a_lookup() -> None:
    target, requests = make_target(torch.float32), groups()
    drafter = make_drafter(target)
    cold = run(target, drafter, Lookup(3), requests, reuse_prefixes=False)
    engine = Engine(target, drafter, EngineOptions(), Lookup(3))
    assert_same(engine.generate(requests), cold)
    assert engine.prefixes.hits > 0
    assert_same(cold, run(target, None, None, requests))


def test_cut_prompts_beside_a_lookup() -> None:
    """Bounded replay of a decoder-decoder target changes what comes out, and a lookup does not change that."""
    target = family("Yoco")
    requests = [Request(r.prompt_ids * 3, r.params) for r in groups()]
    for mode in ("compact", "mask"):
        options: dict[str, Any] = {"truncation": mode, "keep_tokens": WINDOW + 6}
        plain = run(target, None, None, requests, **options)
        assert outputs(plain) != outputs(run(target, None, None, requests)), "inconclusive: nothing was cut"
        for chunk in (256, 7):
            done = run(target, drafter_of(target), Lookup(3), requests, prefill_chunk=chunk, **options)
            assert_same(done, plain)
            assert min(*by("lookup", done), *by("drafter", done)) > 0
    with pytest.raises(DsparkError, match="expected keep >= 20"):
        Engine(target, None, EngineOptions(truncation="compact", keep_tokens=WINDOW + 6), Lookup(10))


def test_a_wide_lookup_rolls_back_no_further_than_rings_reach() -> None:
    """Ten drafts and their anchor: the ring of a sliding window holds as many entries more."""
    target, requests = family("Qwen2"), groups(temperature=0.0, max_tokens=80)
    engine = Engine(target, drafter_of(target), EngineOptions(), Lookup(10))
    assert engine.backtracking == 11
    run_ = engine.begin(requests)
    assert run_.cache.entries == {WINDOW: WINDOW + 11}
    done = engine.generate(requests)
    assert max(r.verified for c in done for r in c.rounds) == 10
    assert_same(done, run(target, None, None, requests))
    with pytest.raises(DsparkError, match=r"backtracking >= 11.*got 10"):
        Engine(target, None, EngineOptions(backtracking=10), Lookup(10))


def remembering(prompt: Sequence[int], *responses: Sequence[int], **fields: int) -> Lookup:
    lookup = Lookup(**{"width": 5, **fields})
    for response in responses:
        lookup.remember(prompt, response)
    return lookup


@pytest.mark.parametrize("at", [2, 4])
def test_a_stop_inside_an_accepted_run_ends_the_sequence(at: int) -> None:
    """A sibling has written on behind what is a stop for this request."""
    target, prompt = make_target(torch.float32), (1, 2, 3)
    for seed in range(100):
        params = SamplingParams(temperature=0.9, max_tokens=20, seq_seed=seed)
        (free,) = run(target, None, None, [Request(prompt, params)])
        if free.token_ids[at] not in free.token_ids[:at]:
            break
    stop = free.token_ids[at]
    request = Request(prompt, SamplingParams(temperature=0.9, max_tokens=20, seq_seed=seed, stop_ids=(stop,)))
    (done,) = run(target, None, remembering(prompt, free.token_ids), [request])
    assert done.token_ids == free.token_ids[: at + 1]
    assert done.finish_reason == "stop"
    assert (done.rounds[-1].drafted[-1], done.rounds[-1].accepted) == (stop, len(done.rounds[-1].drafted))
    assert_same([done], run(target, None, None, [request]))


@pytest.mark.parametrize("most", [1, 2, 3, 5, 7])
def test_the_budget_ends_inside_a_run(most: int) -> None:
    target, prompt = make_target(torch.float32), (1, 2, 3)
    params = SamplingParams(temperature=0.9, max_tokens=20, seq_seed=4)
    (free,) = run(target, None, None, [Request(prompt, params)])
    short = Request(prompt, SamplingParams(temperature=0.9, max_tokens=most, seq_seed=4))
    lookup = remembering(prompt, free.token_ids)
    (done,) = run(target, None, lookup, [short])
    assert done.token_ids == free.token_ids[:most]
    assert done.finish_reason == "length"
    assert sum(r.accepted + 1 for r in done.rounds) <= most
    assert counts([done])[1] > 0 or most < 3
    assert lookup.remembered == 2


def test_who_drafts_is_the_same_in_the_same_run() -> None:
    """No clock decides: the rounds of equal runs are equal, confidences included."""
    target = make_target(torch.float32)
    drafter, cheap = make_drafter(target), CapacityCurve((1, 80), (1.0, 1.2), (1, 12), (0.01, 0.01))
    runs = [run(target, drafter, Lookup(4), groups(), policy="global", curve=cheap, max_batch=5) for _ in range(2)]
    assert [c.rounds for c in runs[0]] == [c.rounds for c in runs[1]]
    assert min(*by("lookup", runs[0]), *by("drafter", runs[0])) > 0


def test_a_request_draws_on_its_siblings_in_the_same_batch() -> None:
    """Twins run side by side, the second one round behind (its prompt is copied): the first one's tokens are there."""
    target = make_target(torch.float32)
    twins = [Request((4, 5, 6, 7), SamplingParams(temperature=0.9, max_tokens=30, seq_seed=1))] * 2
    alone = run(target, None, Lookup(4), twins[:1])
    both = run(target, None, Lookup(4), twins, prefill_chunk=4)
    assert_same(both, [alone[0]] * 2)
    assert counts(both[1:])[1] > counts(alone)[1]


def test_a_lookup_outlives_engines_and_knows_the_last_epoch() -> None:
    target, lookup = make_target(torch.float32), Lookup(4)
    requests = groups(temperature=0.4)
    again = [Request(r.prompt_ids, r.params.with_seed(1000 + i)) for i, r in enumerate(requests)]
    for some in (requests, again):
        assert_same(run(target, None, lookup, some), run(target, None, None, some))
    fresh = run(target, None, Lookup(4), again)
    known = run(target, None, remembering_all(requests, target), again)
    assert counts(known)[1] / counts(known)[0] != counts(fresh)[1] / counts(fresh)[0]
    assert counts(known)[1] > counts(fresh)[1]
    assert lookup.remembered == 2 * len(requests)


def remembering_all(requests: list[Request], target: Target) -> Lookup:
    lookup = Lookup(4)
    for request, done in zip(requests, run(target, None, None, requests), strict=True):
        lookup.remember(request.prompt_ids, done.token_ids)
    return lookup


def test_an_engine_remembers_what_it_finished() -> None:
    """As if every response had been handed over; and an interrupted call leaves what it had written."""
    target, requests = make_target(torch.float32), groups(each=2)
    lookup = Lookup(4)
    done = run(target, None, lookup, requests)
    by_hand = Lookup(4)
    for request, completion in zip(requests, done, strict=True):
        by_hand.remember(request.prompt_ids, completion.token_ids)
    for request, completion in zip(requests, done, strict=True):
        for n in range(1, 40, 3):
            trails = [one.follow(request.prompt_ids) for one in (lookup, by_hand)]
            for trail in trails:
                trail.tokens += completion.token_ids[:n]  # what it asks, unwritten
            assert trails[0]._next(trails[0].tokens[-8:])[1] == trails[1]._next(trails[1].tokens[-8:])[1]

    def stop(index: int, _: Completion) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Engine(target, None, EngineOptions(), lookup).generate(requests, stop)
    assert_same(run(target, None, lookup, requests), done)


def test_texts_of_no_tokens_are_nothing_to_go_by() -> None:
    lookup = remembering((), (), (1, 2, 1, 2, 1))
    assert (lookup.remembered, lookup.largest) == (2, 2)
    trail = lookup.follow(())
    assert trail.draft(3).token_ids == ()
    trail.write((1, 2))
    assert trail.draft(3).token_ids == (1, 2, 1)
    assert trail.draft(0).token_ids == ()


def test_old_trajectories_are_forgotten_with_their_prompts() -> None:
    lookup = Lookup(4, window=3, min_match=2)
    for i in range(8):
        lookup.remember((100 + i, 1), (2, 3, 200 + i, 4, 5))
    assert lookup.remembered == 3
    assert len(lookup._groups) == 3
    trail = lookup.follow((9, 9))
    assert lookup.remembered == 3
    trail.write((2, 3))
    assert trail.draft(1).token_ids == (207,)  # the latest of those left
    assert lookup.largest == 207
    for i in range(3):
        lookup.remember((i, i), (i, i))
    trail.write((4, 5))  # outlived: it still drafts, and leaves nothing
    assert trail.forgotten
    assert trail.draft(2).token_ids == ()
    lookup.remember((4,), (5,))
    while lookup.remembered:
        lookup._forget_oldest()
    assert lookup.all.empty
    assert not lookup._groups


def test_the_prompts_tree_and_the_others_are_weighed_by_what_they_were_worth() -> None:
    lookup = remembering((1, 2), (0, 3, 4, 5), (0, 3, 4, 5))
    lookup.remember((7,), (3, 4, 6, 3, 4, 6, 3, 4, 6))
    trail = lookup.follow((1, 2))
    trail.write((9, 3, 4))  # seen twice before 5 here, thrice before 6 elsewhere
    assert trail.draft(1).token_ids == (5,)  # of equal rates the prompt's own
    lookup.rates.learn([((0, 2, "always"), 5)], [6])
    assert trail.draft(1).token_ids == (6,)


def test_rates_and_gain_by_hand() -> None:
    rates = Rates()
    assert rates.of("x") == 0.5
    rates.learn([("x", 1), ("x", 2), ("y", 3), ("z", 4)], [1, 2, 9, 4])
    assert [rates.of(kind) for kind in "xyz"] == [3 / 4, 1 / 3, 1 / 2]  # behind the first miss nothing is learned
    rates.learn([("z", 1), ("z", 1)], [1])
    assert rates.of("z") == 2 / 3
    for _ in range(3000):
        rates.learn([("x", 1)], [1])
    assert rates.of("x") > 0.99
    for _ in range(2000):
        rates.learn([("x", 1)], [0])
    assert rates.of("x") < 0.5
    assert gain((0.5, 0.5, 1.0)) == 1.0
    assert gain(()) == 0.0


def test_rates_come_from_outcomes() -> None:
    """What they say after a run is what its rounds say, by match length or not: all of it was verified."""
    target, lookup = make_target(torch.float32), Lookup(4)
    done = run(target, None, lookup, groups(4, 6))
    rounds = [r for c in done for r in c.rounds]
    tried = sum(min(r.accepted + 1, r.verified) for r in rounds)
    kinds = lookup.rates._counts.values()
    assert tried == sum(t for _, t in kinds)
    assert sum(r.accepted for r in rounds) == sum(a for a, _ in kinds) > 0


def test_the_model_is_not_asked_where_a_lookup_is_likely_to_do() -> None:
    target, requests = make_target(torch.float32), groups(temperature=0.0, max_tokens=120)
    drafter = make_drafter(target)
    asked: list[int] = []
    propose = drafter.propose
    drafter.propose = lambda tokens, *rest: asked.append(len(tokens)) or propose(tokens, *rest)
    run(target, drafter, None, requests)
    alone, asked[:] = sum(asked), []
    done = run(target, drafter, Lookup(4), requests, curve=CURVE)
    assert 0 < sum(asked) < alone / 2
    assert_same(done, run(target, None, None, requests))


def test_a_lookup_is_refused_under_rejection_and_where_labels_are_collected() -> None:
    target = make_target(torch.float32)
    with pytest.raises(DsparkError, match=r"lookup expects the coupled.*depend on its company"):
        Engine(target, None, EngineOptions("rejection"), Lookup(4))
    with pytest.raises(DsparkError, match="commit_to_cap collects the rounds of a draft model"):
        Engine(target, make_drafter(target), EngineOptions(commit_to_cap=True), Lookup(4))
    for wrong in ({"width": 0}, {"window": 0}, {"min_match": 0}, {"min_match": 9}):
        with pytest.raises(DsparkError, match=r"lookup: expected width and window >= 1"):
            Lookup(**wrong)
    lookup = remembering((1,), (VOCAB, 2))
    with pytest.raises(DsparkError, match=f"remembers {VOCAB}. Make a Lookup for each tokenizer"):
        run(target, None, lookup, groups())
    with pytest.raises(DsparkError, match="token ids >= 0, but got -1"):
        Lookup().remember((1,), (-1,))
