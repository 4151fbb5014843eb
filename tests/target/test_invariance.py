"""A token's hidden state is a function of its sequence alone: how it went through the decoder leaves no trace."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from dspark.target.cache import KVCache
from dspark.target.decoder import Target

LENGTH, TAPS = 19, (-1, 1)
FAMILIES = [
    ("Qwen3ForCausalLM", {}),
    ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    ("MistralForCausalLM", {"sliding_window": 5}),
]
every = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
everywhere = pytest.mark.parametrize(("architecture", "fields"), FAMILIES, ids=[f[0] for f in FAMILIES])


def tokens(count: int, seed: int) -> Tensor:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed))


def poisoned(target: Target, capacity: int) -> KVCache:
    cache = KVCache(
        target.config.cached_windows, capacity, target.config.num_kv_heads, target.config.head_dim, target.dtype
    )
    for arena in (*cache.k, *cache.v):
        arena.fill_(float("nan"))
    return cache


Piece = tuple[Tensor, int, int]  # ids, position of the first, arena row of the sequence's position 0


def run(target: Target, cache: KVCache, pieces: Iterable[Piece]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """One forward over all pieces; (hidden, features, logits) of each."""
    pieces = list(pieces)
    positions = [torch.arange(start, start + len(ids)) for ids, start, _ in pieces]
    rows = torch.cat([p + base for p, (_, _, base) in zip(positions, pieces, strict=True)])
    begin = torch.cat([torch.full_like(p, base) for p, (_, _, base) in zip(positions, pieces, strict=True)])
    ids = torch.cat([piece[0] for piece in pieces])
    hidden, features = target.forward(ids, torch.cat(positions), rows, begin, rows + 1, cache, TAPS)
    sizes = [len(p) for p in positions]
    return list(zip(*(t.split(sizes) for t in (hidden, features, target.logits(hidden))), strict=True))


def chunked(target: Target, ids: Tensor, size: int, base: int = 0) -> list[Tensor]:
    cache = poisoned(target, base + len(ids))
    parts = [run(target, cache, [(ids[i : i + size], i, base)])[0] for i in range(0, len(ids), size)]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def assert_same(left: Iterable[Tensor], right: Iterable[Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)


@every
@everywhere
def test_chunk_size_and_arena_row_leave_no_trace(tiny_target, dtype, architecture, fields):
    target, ids = tiny_target(dtype, architecture, **fields), tokens(LENGTH, 1)
    whole = chunked(target, ids, LENGTH)
    for size, base in ((1, 0), (3, 0), (LENGTH, 11), (7, 4)):
        assert_same(whole, chunked(target, ids, size, base))


@every
@everywhere
def test_company_leaves_no_trace(tiny_target, dtype, architecture, fields):
    target, ids = tiny_target(dtype, architecture, **fields), tokens(LENGTH, 1)
    whole = chunked(target, ids, LENGTH)
    others = [tokens(n, 10 + n) for n in (33, 1, 8)]
    cache = poisoned(target, 100)
    mixed = run(target, cache, [(others[0], 0, 50), (ids, 0, 20), (others[1], 0, 99), (others[2], 0, 0)])
    assert_same(whole, mixed[1])
    first = run(target, poisoned(target, 100), [(ids[:10], 0, 20), (others[0][:5], 0, 50)])
    assert_same([part[:10] for part in whole], first[0])


@every
def test_prefill_decode_and_verify_share_a_batch(tiny_target, dtype):
    """One call holds a prompt chunk, a decoded token and a block under verification, each at its own place."""
    target = tiny_target(dtype)
    a, b, c = (tokens(LENGTH, s) for s in (1, 2, 3))
    alone = [chunked(target, ids, LENGTH) for ids in (a, b, c)]
    cache = poisoned(target, 60)
    run(target, cache, [(a[:4], 0, 0), (b[:18], 0, 20), (c[:12], 0, 40)])
    chunk, decoded, block = run(target, cache, [(a[4:11], 4, 0), (b[18:], 18, 20), (c[12:18], 12, 40)])
    assert_same([part[4:11] for part in alone[0]], chunk)
    assert_same([part[18:] for part in alone[1]], decoded)
    assert_same([part[12:18] for part in alone[2]], block)


@every
def test_rolled_back_rows_leave_no_trace(tiny_target, dtype):
    target, ids = tiny_target(dtype), tokens(LENGTH, 1)
    whole, cache = chunked(target, ids, LENGTH), poisoned(target, LENGTH + 6)
    run(target, cache, [(ids[:8], 0, 0)])
    run(target, cache, [(torch.cat([ids[8:9], tokens(5, 77)]), 8, 0)])  # an anchor and five drafts, all rejected
    assert_same([part[9:] for part in whole], run(target, cache, [(ids[9:], 9, 0)])[0])


@every
def test_whole_sequences_equal_the_cached_path(tiny_target, dtype):
    target, ids = tiny_target(dtype), tokens(LENGTH, 1)
    hidden, features, offsets = target.forward_sequences([tokens(6, 9), ids, tokens(2, 8)], TAPS)
    assert offsets.tolist() == [0, 6, 6 + LENGTH, 8 + LENGTH]
    mine = slice(6, 6 + LENGTH)
    assert_same(chunked(target, ids, 1), [hidden[mine], features[mine], target.logits(hidden[mine])])


@every
def test_thread_count_leaves_no_trace(tiny_target, dtype):
    target, ids, before = tiny_target(dtype), tokens(LENGTH, 1), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = chunked(target, ids, LENGTH)
        torch.set_num_threads(2)
        assert_same(one, chunked(target, ids, 5))
    finally:
        torch.set_num_threads(before)
