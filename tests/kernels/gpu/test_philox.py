"""Keyed noise in Triton: the bits of dspark/noise.py, by both ways of drawing it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from dspark import noise
from dspark_kernels.gpu import philox
from dspark_kernels.gpu.philox import gumbel_run

SEEDS = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, 2**33 + 7, 2**62 + 12345, 2**63 - 1, 987654321])
POSITIONS = torch.tensor([0, 1, 5, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 77, 1000])
STREAMS = (noise.TARGET, noise.DRAFT, noise.ACCEPT, noise.RESIDUAL)


@triton.jit
def _run_of_one(seed, position, out, first, COUNT: tl.constexpr):
    values = gumbel_run(tl.load(seed), 1, tl.load(position), first, COUNT)
    tl.store(out + tl.arange(0, COUNT), values)


@triton.jit
def _run_of_rows(seeds, positions, out, first, ROWS: tl.constexpr, COUNT: tl.constexpr):
    row = tl.arange(0, ROWS)
    values = gumbel_run(tl.load(seeds + row)[:, None], 1, tl.load(positions + row)[:, None], first, COUNT)
    tl.store(out + row[:, None] * COUNT + tl.arange(0, COUNT)[None, :], values)


@pytest.mark.parametrize("stream", STREAMS)
def test_the_bits_of_the_standard(stream: int) -> None:
    ids = torch.cat((torch.arange(1030), torch.tensor([49151, 151935, 2**31 - 1, 2**32 + 5])))
    assert torch.equal(philox.gumbel(SEEDS, stream, POSITIONS, ids), noise.gumbel(SEEDS, stream, POSITIONS, ids))
    assert torch.equal(philox.uniform(SEEDS, stream, POSITIONS), noise.uniform(SEEDS, stream, POSITIONS))


def test_many_uniforms() -> None:
    seeds, positions = torch.arange(2500) * 7919, torch.arange(2500) % 97
    assert torch.equal(philox.uniform(seeds, 2, positions), noise.uniform(seeds, 2, positions))


@pytest.mark.parametrize("first", [0, 4, 1020])
def test_four_words_a_call_are_the_same_noise(first: int) -> None:
    seeds, positions, ids = SEEDS[-4:].contiguous(), POSITIONS[-4:].contiguous(), torch.arange(first, first + 64)
    expected = noise.gumbel(seeds, 1, positions, ids)
    one, rows = torch.full((64,), torch.nan), torch.full((4, 64), torch.nan)
    _run_of_one[(1,)](seeds, positions, one, first, COUNT=64)
    _run_of_rows[(1,)](seeds, positions, rows, first, ROWS=4, COUNT=64)
    assert torch.equal(one, expected[0])
    assert torch.equal(rows, expected)


def test_near_the_true_logarithms() -> None:
    """Two logarithms of 1 ulp each: 1e-7 of the inner one's value, then an ulp of a value up to 16.6 (1e-6)."""
    ids = torch.arange(1500)
    got, truth = philox.gumbel(SEEDS, 0, POSITIONS, ids), philox.gumbel_reference(SEEDS, 0, POSITIONS, ids)
    assert (got - truth).abs().max() <= 2e-6
    assert torch.equal(philox.uniform(SEEDS, 2, POSITIONS), philox.uniform_reference(SEEDS, 2, POSITIONS))


def test_a_row_alone() -> None:
    ids = torch.arange(9)
    whole = philox.gumbel(SEEDS, 3, POSITIONS, ids)
    for n in range(len(SEEDS)):
        assert torch.equal(philox.gumbel(SEEDS[n : n + 1], 3, POSITIONS[n : n + 1], ids), whole[n : n + 1])


def test_nothing_to_draw() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert philox.gumbel(none, 0, none, torch.arange(3)).shape == (0, 3)
    assert philox.gumbel(SEEDS, 0, POSITIONS, none).shape == (9, 0)
    assert philox.uniform(none, 0, none).shape == (0,)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"positions \[9\] of int64, but got \[8\]"):
        philox.uniform(SEEDS, 0, POSITIONS[:8])
    with pytest.raises(ValueError, match=r"int64, but got \[9\] of torch.int32"):
        philox.uniform(SEEDS, 0, POSITIONS.int())
    with pytest.raises(ValueError, match="contiguous"):
        philox.uniform(SEEDS[::2], 0, POSITIONS[::2])
