"""Philox against its published vectors, the noise's ranges and moments, and equality with the C kernels."""

from __future__ import annotations

import pytest
import torch

from dspark import noise, ops
from dspark.ops.cpu.native import lib

VECTORS = [  # Random123's kat_vectors for philox4x32-10: counter, key, output
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
SEEDS = torch.tensor([0, 1, 2**62 + 12345678901, 2**63 - 1])
POSITIONS = torch.tensor([0, 7, 100000, 2**31 + 3])


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], expected: str) -> None:
    words = noise.philox_block(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert " ".join(f"{int(word):08x}" for word in words) == expected


def test_words_follow_the_counter_layout() -> None:
    seed, position, stream = torch.tensor(0x0123456789ABCDEF), torch.tensor(77), 3
    ids = torch.arange(12)
    got = noise.philox(seed, stream, position, ids)
    for token in range(12):
        counter = (torch.tensor(token // 4), position, torch.tensor(stream), torch.tensor(0))
        block = noise.philox_block(counter, (torch.tensor(0x89ABCDEF), torch.tensor(0x01234567)))
        assert got[token] == block[token % 4]


@pytest.mark.parametrize("stream", [noise.TARGET, noise.RESIDUAL])
def test_kernel_and_torch_noise_are_equal_bit_for_bit(stream: int) -> None:
    ids = torch.cat((torch.arange(3000), torch.arange(49000, 49152), torch.tensor([2**20 + 1, 2**31 - 1])))
    expected = noise.gumbel(SEEDS, stream, POSITIONS, ids)
    got = torch.full(expected.shape, torch.nan)
    arguments = (t.data_ptr() for t in (got, SEEDS, POSITIONS, ids))
    lib().dspark_gumbel(*arguments, stream, *expected.shape)
    assert torch.equal(got, expected)
    assert torch.equal(ops.uniform(SEEDS, stream, POSITIONS), noise.uniform(SEEDS, stream, POSITIONS))


def test_the_logarithm_is_right_over_every_uniform() -> None:
    words = torch.arange(0, 2**23, 7) << 9
    u = noise.unit(words)
    assert float(u.min()) > 0
    assert float(u.max()) < 1
    assert torch.equal(u.double(), (torch.arange(0, 2**23, 7).double() + 0.5) / 2**23), "exact in fp32"
    exact = u.double().log()
    assert float(((noise.log_fp32(u).double() - exact) / exact).abs().max()) < 2.0**-23


def test_extremes_are_finite() -> None:
    ends = torch.tensor([0, 0xFFFFFFFF])
    values = -noise.log_fp32(-noise.log_fp32(noise.unit(ends)))
    torch.testing.assert_close(values, torch.tensor([-2.81155, 16.63553]), atol=1e-4, rtol=0)


def test_gumbel_moments() -> None:
    values = noise.gumbel(torch.arange(40), noise.TARGET, torch.arange(40), torch.arange(5000)).double()
    assert abs(float(values.mean()) - 0.57722) < 0.01
    assert abs(float(values.var()) - 1.64493) < 0.03
    across = torch.corrcoef(values)
    assert float((across - torch.eye(40)).abs().max()) < 0.08


def test_derived_seeds() -> None:
    seeds = {noise.derive_seed(run, prompt, k) for run in (0, 1) for prompt in ("a", "b") for k in range(50)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert noise.derive_seed(0, "a", 0) == 1509917800607555658, "pinned: a change of scheme needs a new RNG_SCHEME"
