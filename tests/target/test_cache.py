"""The arena allocator: first fit, coalescing, and no row given twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.target.cache import Arena, KVCache


def test_first_fit_takes_the_lowest_gap_that_is_large_enough():
    arena = Arena(10)
    bases = [arena.alloc(2), arena.alloc(3), arena.alloc(4)]
    assert bases == [0, 2, 5]
    assert arena.used == 9
    arena.free(0)
    assert arena.alloc(3) is None
    assert arena.alloc(1) == 0
    assert arena.alloc(1) == 1
    assert arena.alloc(1) == 9
    assert arena.alloc(1) is None


@pytest.mark.parametrize("order", [(0, 3, 6), (6, 3, 0), (3, 0, 6), (0, 6, 3)])
def test_freed_neighbours_are_joined(order: tuple[int, ...]):
    arena = Arena(9)
    assert [arena.alloc(3) for _ in range(3)] == [0, 3, 6]
    for base in order:
        arena.free(base)
    assert arena.used == 0
    assert arena.alloc(9) == 0


def test_freeing_what_is_not_in_use_is_an_error():
    arena = Arena(4)
    arena.alloc(2)
    with pytest.raises(AssertionError, match="row 1"):
        arena.free(1)
    assert Arena(0).alloc(1) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_regions_never_overlap_and_all_comes_back(steps: list[tuple[bool, int]]):
    arena, held = Arena(40), {}
    for take, rows in steps:
        if take:
            base = arena.alloc(rows)
            if base is not None:
                held[base] = rows
        elif held:
            base = sorted(held)[rows % len(held)]
            arena.free(base)
            del held[base]
        taken = [row for base, length in held.items() for row in range(base, base + length)]
        assert len(set(taken)) == len(taken) == arena.used
        assert all(0 <= row < 40 for row in taken)
    for base in held:
        arena.free(base)
    assert arena.alloc(40) == 0


def test_every_layer_has_its_own_arena():
    cache = KVCache((0, 0, 0), 5, 2, 4, torch.bfloat16)
    assert len({k.data_ptr() for k in cache.k}) == 3
    assert cache.v[2].shape == (5, 2, 4)
    assert cache.v[2].dtype == torch.bfloat16
