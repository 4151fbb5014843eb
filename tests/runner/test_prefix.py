"""Prefix reuse: cold and warm give the same bits, and warm is warm."""

from __future__ import annotations

import pytest
import torch

from dspark.contracts import Request, SamplingParams
from dspark.runner import Engine, EngineOptions
from dspark.runner.batch import FlatBatch
from dspark.runner.prefix import WORTH_WAITING, sources
from dspark.runner.sequence import Sequence
from tests.runner.conftest import VOCAB, counts, make_drafter, outputs

SYSTEM = tuple(torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(1)).tolist())


def requests(groups: int = 4, each: int = 3, **params: object) -> list[Request]:
    """Groups of equal prompts behind one system turn; one prompt is the system turn alone, one shares nothing."""
    settings: dict = {"temperature": 0.9, "max_tokens": 11} | params
    prompts = [(*SYSTEM, *range(1, 2 + group)) for group in range(groups) for _ in range(each)]
    prompts += [SYSTEM, (12, 12, 3)]
    return [Request(p, SamplingParams(**settings, seq_seed=i)) for i, p in enumerate(prompts)]


def run(target, drafter, some, **options):
    engine = Engine(target, drafter, EngineOptions(**options))
    return engine.generate(some), engine.prefixes


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
@pytest.mark.parametrize("options", [{}, {"max_batch": 2}, {"prefill_chunk": 7}, {"kv_tokens": 90}, {"max_batch": 1}])
def test_cold_and_warm_are_the_same(target, drafter, verifier, options) -> None:
    """Rounds too: the draft model's context was copied with the rest. kv_tokens 90: two sequences at once, so what is
    kept makes room."""
    cold, none = run(target, drafter, requests(), verifier=verifier, reuse_prefixes=False, **options)
    warm, some = run(target, drafter, requests(), verifier=verifier, **options)
    assert min(counts(warm)) > 0
    assert outputs(warm) == outputs(cold)
    assert [c.rounds for c in warm] == [c.rounds for c in cold]
    assert (none.hits, none.reused) == (0, 0)
    assert some.hits >= 6
    assert some.reused >= 30 * 6
    assert some.prompt_tokens == none.prompt_tokens == sum(len(r.prompt_ids) for r in requests())


def test_equal_prompts_are_read_once_and_their_last_token_by_each(target) -> None:
    same = [Request(SYSTEM, SamplingParams(max_tokens=3, seq_seed=i)) for i in range(5)]
    _, count = run(target, None, same)
    assert (count.hits, count.reused) == (4, 4 * 29)
    _, count = run(target, None, same, prefill_chunk=8)
    assert count.hits == 4
    assert 4 * (29 - WORTH_WAITING) <= count.reused < 4 * 29, "the last few tokens are not waited for"


def test_nothing_is_shared_where_nothing_is_alike(target) -> None:
    alone = [Request((i, 5, 5, 5), SamplingParams(max_tokens=3, seq_seed=0)) for i in range(4)]
    _, count = run(target, None, alone)
    assert (count.hits, count.reused) == (0, 0)


def test_an_answer_is_a_prefix_too(target) -> None:
    """The next turn of a conversation begins with the last one and its answer."""
    first = Request(SYSTEM, SamplingParams(max_tokens=9, seq_seed=4))
    (done,), _ = run(target, None, [first])
    turn = (*SYSTEM, *done.token_ids, 1, 2)
    both = [first, Request(turn, SamplingParams(max_tokens=5, seq_seed=5))]
    cold, _ = run(target, None, both, max_batch=1, reuse_prefixes=False)
    warm, count = run(target, None, both, max_batch=1)
    assert outputs(warm) == outputs(cold)
    assert count.reused == 30 + 8  # the answer's last token was emitted and never read


def test_the_best_sources_by_hand() -> None:
    def sequence(tokens: tuple[int, ...], cached: int) -> Sequence:
        made = Sequence(0, Request(tokens, SamplingParams(seq_seed=0)), 0)
        made.cached = cached
        return made

    mine = sequence((1, 2, 3, 4, 5), 0)
    done, half, other = sequence((1, 2, 9), 3), sequence((1, 2, 3, 4, 7), 1), sequence((2,), 1)
    now, later = sources(mine, [done, half, other])
    assert (now.donor, now.ready, now.coming) == (done, 2, 2)
    assert (later.donor, later.ready, later.coming) == (half, 1, 4)
    assert sources(mine, [other]) == (None, None)
    assert sources(mine, [done, half], lambda source, _: source.donor is half) == (later, later)
    twin, same = sources(mine, [sequence((1, 2, 3, 4, 5), 5)])
    assert (twin.ready, twin.coming) == (4, 4)
    assert twin == same
    assert sources(sequence((1,), 0), [done]) == (None, None)


def test_a_request_without_a_seed_gets_one_and_says_so(target) -> None:
    twice = [Request(SYSTEM, SamplingParams(max_tokens=20))] * 2
    done, _ = run(target, None, twice)
    assert done[0].seq_seed != done[1].seq_seed
    assert done[0].token_ids != done[1].token_ids
    again, _ = run(target, None, [Request(SYSTEM, SamplingParams(max_tokens=20, seq_seed=c.seq_seed)) for c in done])
    assert outputs(again) == outputs(done)


def test_a_draft_model_of_another_seed_sees_the_copied_context(target) -> None:
    reference, _ = run(target, None, requests())
    for seed in (2, 9):
        got, count = run(target, make_drafter(target, seed=seed), requests())
        assert count.hits > 0
        assert outputs(got) == outputs(reference)


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_a_windowed_context_is_replayed_from_its_window_and_exactly(target, verifier) -> None:
    """The draft model sees the last 6 tokens: of a prompt only those are encoded, and every round is the same."""
    drafter = make_drafter(target, sliding_window=6)
    encode, rows = drafter.encode, []

    def counted(features, positions):
        rows.append(len(positions))
        return encode(features, positions)

    drafter.encode = counted
    long = [Request((*SYSTEM, *range(n)), SamplingParams(max_tokens=12, seq_seed=n)) for n in (1, 5, 9, 12)]
    for options in ({"reuse_prefixes": False}, {"prefill_chunk": 5}, {}):
        rows.clear()
        cut, _ = run(target, drafter, long, verifier=verifier, **options)
        few = sum(rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dspark.runner.batch.FlatBatch.final_rows", everything)
            rows.clear()
            whole, _ = run(target, drafter, long, verifier=verifier, **{**options, "reuse_prefixes": False})
        assert min(counts(cut)) > 0
        assert outputs(cut) == outputs(whole)
        assert [c.rounds for c in cut] == [c.rounds for c in whole]
        assert few < 0.7 * sum(rows)


def everything(batch, kept, window=0):
    """final_rows without a window."""
    return FINAL_ROWS(batch, kept)


FINAL_ROWS = FlatBatch.final_rows
