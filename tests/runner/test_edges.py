"""Where rounds end, and drafters of every kind: perfect, adversarial, random. The output never knows."""

from __future__ import annotations

import pytest
import torch

from dspark.contracts import Completion, DsparkError, MTPPredictInfo, Request, SamplingParams
from dspark.runner import Engine, EngineOptions
from dspark.runner.draft import Drafts
from dspark.runner.sequence import Sequence
from dspark.target.decoder import Target
from tests.runner.conftest import VOCAB, make_drafter, make_requests, make_target, outputs

BLOCK = 5


class Scripted:
    """Stands in for the draft stage: drafts come from what plain decoding emitted, changed by `change`."""

    window = 0

    def __init__(self, plain: list[Completion], change, width: int = BLOCK):
        self.plain, self.change, self.width = plain, change, width

    def commit(self, *_: torch.Tensor) -> None:
        pass

    def forget(self, base: int) -> None:
        pass

    def propose(self, sequences: list[Sequence], _: object) -> Drafts:
        found = []
        for s in sequences:
            done = len(s.tokens) - s.prompt_length
            coming = self.plain[s.index].token_ids[done : done + self.width]
            coming += (0,) * (self.width - len(coming))
            tokens = tuple(self.change(s, k, token) for k, token in enumerate(coming))
            found.append(MTPPredictInfo(tokens, tuple(0.1 + 0.15 * k for k in range(self.width))))
        return Drafts(found, None)


def perfect(_: Sequence, k: int, token: int) -> int:
    return token


def adversarial(_: Sequence, k: int, token: int) -> int:
    return (token + 1) % VOCAB


def random(s: Sequence, k: int, token: int) -> int:
    return token if (7 * len(s.tokens) + 3 * k + s.index) % 3 else (token + 2) % VOCAB


def plain_of(target: Target, requests: list[Request]) -> list[Completion]:
    return Engine(target).generate(requests)


def scripted(target: Target, requests: list[Request], change, plain: list[Completion] | None = None, **options: object):
    """With drafts as `change` makes them from what requests without a stop would emit."""
    endless = [Request(r.prompt_ids, SamplingParams(**{**r.params.as_dict(), "stop_ids": (), "max_tokens": 40}))
               for r in requests]  # fmt: skip
    engine = Engine(target, make_drafter(target, block_size=BLOCK), EngineOptions(reuse_prefixes=False, **options))
    run = engine.begin(requests)
    run.drafting = Scripted(plain or plain_of(target, endless), change)
    done = {}
    with torch.inference_mode():
        while run.busy:
            done.update({s.index: s.completion() for s in run.round()})
    return [done[i] for i in range(len(requests))]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("change", "accepts"), [(perfect, "all"), (adversarial, "none"), (random, "some")])
def test_any_drafter_any_width_any_schedule(target, temperature: float, change, accepts: str) -> None:
    requests = make_requests(7, temperature=temperature)
    reference = outputs(plain_of(target, requests))
    for options in (
        {},
        {"verify_tokens": 1},
        {"verify_tokens": 3, "max_batch": 2},
        {"policy": "threshold", "threshold": 0.05},
        {"commit_to_cap": True, "verify_tokens": 2},
    ):
        done = scripted(target, requests, change, **options)
        assert outputs(done) == reference, options
        rounds = [r for c in done for r in c.rounds]
        assert rounds
        accepted, verified = sum(r.accepted for r in rounds), sum(r.verified for r in rounds)
        assert {"all": accepted == verified, "none": accepted == 0, "some": 0 < accepted < verified}[accepts]


def stopping(target: Target, at: int, **params: object) -> tuple[Request, tuple[int, ...]]:
    """A request whose token number `at` is its first stop token (of two), and what it emits without one."""
    for seed in range(200):
        given = SamplingParams(temperature=0.9, max_tokens=30, seq_seed=seed)
        tokens = plain_of(target, [Request((1, 2, 3), given)])[0].token_ids
        other = next(v for v in range(VOCAB) if v not in tokens[: at + 1])
        if tokens[at] not in tokens[:at]:
            params = {"temperature": 0.9, "max_tokens": 30, "seq_seed": seed, **params}
            return Request((1, 2, 3), SamplingParams(stop_ids=(other, tokens[at]), **params)), tokens
    raise AssertionError("no such request among 200")


def test_stop_as_second_of_five_accepted_drafts() -> None:
    """The first token comes with the prompt; the round's drafts are tokens 1 to 5, the stop is its second."""
    target = make_target(torch.float32)
    request, tokens = stopping(target, 2)
    (done,) = scripted(target, [request], perfect)
    assert done.token_ids == tokens[:3]
    assert done.finish_reason == "stop"
    (only,) = done.rounds
    assert (only.drafted, only.verified, only.accepted) == (tokens[1:3], 2, 2)
    assert len(done.logprobs) == len(done.raw_logprobs) == 3


@pytest.mark.parametrize(("most", "reason"), [(3, "stop"), (2, "length"), (1, "length"), (4, "stop")])
def test_stop_and_budget_in_one_round(most: int, reason: str) -> None:
    target = make_target(torch.float32)
    request, tokens = stopping(target, 2, max_tokens=most)
    for change in (perfect, adversarial):
        (done,) = scripted(target, [request], change)
        assert done.token_ids == tokens[: min(most, 3)]
        assert done.finish_reason == reason
        assert outputs([done]) == outputs(plain_of(target, [request]))


def test_a_drafted_stop_that_is_rejected_ends_nothing() -> None:
    target = make_target(torch.float32)
    request, _ = stopping(target, 6)
    stop = request.params.stop_ids[1]
    (done,) = scripted(target, [request], lambda s, k, token: stop if k == 1 else token)
    assert outputs([done]) == outputs(plain_of(target, [request]))
    assert any(stop in r.drafted and r.accepted < r.drafted.index(stop) + 1 for r in done.rounds)


def test_greedy_by_any_name(target) -> None:
    """Temperature 0 whatever truncation says, and top_k 1 at a temperature."""
    reference = [c.token_ids for c in plain_of(target, make_requests(6, temperature=0.0))]
    for params in ({"temperature": 0.0, "top_k": 50}, {"temperature": 0.0, "top_p": 0.3, "min_p": 0.5},
                   {"temperature": 0.7, "top_k": 1}):  # fmt: skip
        requests = make_requests(6, **params)
        done = Engine(target, make_drafter(target)).generate(requests)
        assert [c.token_ids for c in done] == reference
        assert all(p == 0.0 for c in done for p in c.logprobs), "the law has one token"


def test_tied_logits_go_to_the_lowest_id() -> None:
    """Tokens 4 and 9 have the same row of the LM head, so every logit of one is the other's."""
    base = make_target(torch.float32)
    target = base.remade(lambda name, t: t.index_copy(0, torch.tensor([9]), t[4:5]) if name == "head" else t)
    requests = make_requests(30, temperature=0.0)
    plain = plain_of(target, requests)
    emitted = {token for c in plain for token in c.token_ids}
    assert 4 in emitted, "inconclusive: the tie never came up"
    assert 9 not in emitted
    assert outputs(Engine(target, make_drafter(target), EngineOptions("greedy")).generate(requests)) == outputs(plain)


def test_requests_without_room_for_drafts_beside_others(target) -> None:
    """Ragged: budgets of 1 and 2 leave no draft, the others run on until one is left."""
    drafter = make_drafter(target)
    requests = [
        Request(r.prompt_ids, SamplingParams(**{**r.params.as_dict(), "max_tokens": n}))
        for r, n in zip(make_requests(7), (1, 2, 1, 40, 3, 17, 2), strict=True)
    ]
    done = Engine(target, drafter).generate(requests)
    assert [len(c.rounds) for c in done[:3]] == [0, 0, 0]
    assert outputs(done) == outputs(plain_of(target, requests))
    scorer = Engine(target)
    for request, c in zip(requests, done, strict=True):
        logprobs, raw = scorer.score(request.prompt_ids, c.token_ids, request.params)
        assert torch.equal(logprobs, torch.tensor(c.logprobs))
        assert torch.equal(raw, torch.tensor(c.raw_logprobs))


class Masked:
    """A target whose logits are -inf from `first` on, as of a vocabulary that was padded; all of them with first 0."""

    def __init__(self, target: Target, first: int):
        self._target, self._first = target, first

    def __getattr__(self, name: str) -> object:
        return getattr(self._target, name)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._target.logits(hidden).clone()
        logits[:, self._first :] = float("-inf")
        return logits


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_tokens_of_logit_minus_infinity_are_never_emitted(target, verifier: str) -> None:
    """Whatever a draft model, which knows of no mask, proposes; and the trainer's pass agrees."""
    masked = Masked(target, VOCAB // 2)
    requests = make_requests(12, temperature=1.0, max_tokens=25)
    drafter = make_drafter(target)
    done = Engine(masked, drafter, EngineOptions(verifier)).generate(requests)
    drafted = {token for c in done for r in c.rounds for token in r.drafted}
    assert max(drafted) >= VOCAB // 2, "inconclusive: no token behind the mask was drafted"
    assert max(token for c in done for token in c.token_ids) < VOCAB // 2
    assert min(min(c.logprobs) for c in done) > -float("inf")
    alone = [Engine(masked, drafter, EngineOptions(verifier, max_batch=1)).generate([r])[0] for r in requests]
    assert outputs(alone) == outputs(done)
    if verifier == "coupled":
        assert outputs(Engine(masked).generate(requests)) == outputs(done)


def test_a_row_of_minus_infinity_is_a_broken_model(target) -> None:
    with pytest.raises(DsparkError, match="a finite entry in every row"):
        Engine(Masked(target, 0)).generate(make_requests(1))
