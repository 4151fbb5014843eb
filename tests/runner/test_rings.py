"""Rings of sliding-window layers: the same bits as keeping everything, in the memory of the window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.contracts import DsparkError, Request, SamplingParams
from dspark.runner import Engine, EngineOptions
from dspark.target.cache import KVCache
from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.rings import Span, plan
from dspark.target.weights import random_weights
from tests.runner.conftest import VOCAB, counts, make_drafter, outputs

WINDOW = 9


def make_windowed(dtype: torch.dtype = torch.float32, kind: str = "all") -> Target:
    """Three layers; all with a window of 9, or (kind "some") only the first."""
    config = read_config(
        {
            "architectures": ["Qwen2ForCausalLM"], "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40,
            "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8,
            "max_position_embeddings": 256, "use_sliding_window": True, "sliding_window": WINDOW,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention"] * 3 if kind == "all" else
            ["sliding_attention", "full_attention", "full_attention"],
        }
    )  # fmt: skip
    assert config.windows[0] == WINDOW
    return Target(config, random_weights(config, 1, dtype, scale=0.35))


def long_requests(count: int = 5) -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    return [
        Request(
            tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()),
            SamplingParams(temperature=0.9, max_tokens=45, seq_seed=n),
        )
        for n in (3, 60, 21, 37, 8)[:count]
    ]


def run(target: Target, drafter, some: list[Request], **options: object):
    engine = Engine(target, drafter, EngineOptions(**options))
    state = engine.begin(some)
    for tensor in (*state.cache.k, *state.cache.v):
        tensor.fill_(torch.nan)  # whoever reads what nobody wrote will not agree with anybody
    done = {}
    with torch.inference_mode():
        while state.busy:
            done.update({s.index: s.completion() for s in state.round()})
    return [done[i] for i in range(len(some))], state


@pytest.mark.parametrize("kind", ["all", "some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"max_batch": 2, "prefill_chunk": 5}, {"prefill_chunk": 30, "verifier": "rejection"}]
)
def test_rings_give_the_bits_of_keeping_everything(kind: str, dtype: torch.dtype, options: dict) -> None:
    """Sequences of many times the ring's length, rejected drafts, chunks longer and shorter than the ring."""
    target = make_windowed(dtype, kind)
    drafter = make_drafter(target)
    whole, state = run(target, drafter, long_requests(), backtracking=500, **options)
    assert not state.cache.entries, "the reference keeps everything"
    ringed, state = run(target, drafter, long_requests(), **options)
    assert state.cache.entries == {WINDOW: WINDOW + 6}
    assert min(counts(ringed)) > 0
    assert outputs(ringed) == outputs(whole)
    assert [c.rounds for c in ringed] == [c.rounds for c in whole]
    plain, _ = run(target, None, long_requests(), **{k: v for k, v in options.items() if k != "verifier"})
    if "verifier" not in options:
        assert outputs(plain) == outputs(ringed)


def test_memory_is_the_windows(target) -> None:
    windowed = make_windowed()
    _, state = run(windowed, None, long_requests())
    rows = 5 * (WINDOW + 6)
    assert all(len(k) == rows for k in state.cache.k)
    whole = KVCache(windowed.config.windows, state.cache.capacity, 1, 8, torch.float32)
    assert state.cache.nbytes * 3 < whole.nbytes
    _, state = run(target, None, long_requests())
    assert not state.cache.entries
    assert all(len(k) == state.cache.capacity for k in state.cache.k)


def test_twins_are_copied_with_their_rings_and_others_are_not() -> None:
    target = make_windowed()
    prompt = long_requests()[1].prompt_ids
    twins = [Request(prompt, SamplingParams(max_tokens=8, seq_seed=i)) for i in range(4)]
    kin = [Request((*prompt[:40], i, i, i), SamplingParams(max_tokens=8, seq_seed=i)) for i in range(3)]
    for some, hits in ((twins, 3), (kin, 0)):
        cold, _ = run(target, make_drafter(target), some, reuse_prefixes=False)
        warm, state = run(target, make_drafter(target), some)
        assert outputs(warm) == outputs(cold)
        assert state.prefixes.hits == hits


def test_a_rollback_past_the_ring_cannot_be_asked_for() -> None:
    assert plan([Span(0, 40, 7, False)], WINDOW, WINDOW + 6).decoding == 7
    with pytest.raises(DsparkError, match="DEEPINFER_MAX_BACKTRACKING_TOKENS"):
        plan([Span(0, 40, 8, False)], WINDOW, WINDOW + 6)
    target = make_windowed()
    with pytest.raises(DsparkError, match="backtracking >= 5"):
        Engine(target, make_drafter(target), EngineOptions(backtracking=4))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 7),
    st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12),
)  # fmt: skip
def test_every_query_sees_its_window_and_nothing_else(window: int, back: int, passes: list) -> None:
    """A ring of position numbers instead of keys, through any passes and rollbacks: two sequences side by side."""
    entries = window + back
    ring = torch.full((2 * entries,), -1)
    lengths = [0, 0]
    for prompt, count, kept in passes:
        count = count if prompt else min(count, back + 1)
        spans = [Span(slot, lengths[slot], count, prompt) for slot in (0, 1)]
        new = torch.tensor([1000 * s.slot + p for s in spans for p in range(s.start, s.start + count)])
        step = plan(spans, window, entries)
        past, fresh = ring[step.tail], new[step.decoding :]
        ring[step.rows] = new[step.kept]
        assert len(set(step.rows.tolist())) == len(step.rows)
        at = step.chunk if prompt else step.ring
        first, second = (past, fresh) if prompt else (ring, ring)
        for i, value in enumerate(new.tolist()):
            a, b, c, d = (int(t[i]) for t in (at.begin, at.end, at.begin2, at.end2))
            position, slot = value % 1000, value // 1000
            wanted = [1000 * slot + p for p in range(max(0, position - window + 1), position + 1)]
            assert [*first[a:b].tolist(), *second[c:d].tolist()] == wanted
        if lengths[0] + count > 90:
            return
        lengths = [n + (count if prompt else min(kept, count)) for n in lengths]
