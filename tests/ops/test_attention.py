"""attention: values, and bits that ignore the batch, the arena, the split of the keys and the threads."""

from __future__ import annotations

import pytest
import torch

from dspark import ops
from dspark.contracts import DsparkError
from dspark_kernels import reference

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 8e-3, "atol": 1e-5}}
SCALE = 0.125
HEADS = [(9, 3, 64), (4, 4, 16), (6, 1, 24), (2, 2, 7), (40, 1, 8), (8, 8, 128)]  # Hq, Hkv, D


def inputs(n: int, t: int, hq: int, hkv: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(rows, h, d).to(dtype) for rows, h in ((n, hq), (t, hkv), (t, hkv)))


def ranges(n: int, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    begin = torch.randint(0, t // 2, (n,))
    return begin, begin + torch.randint(0, t // 2, (n,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hq", "hkv", "d"), HEADS)
def test_agrees_with_the_reference(hq: int, hkv: int, d: int, dtype: torch.dtype) -> None:
    q, k, v = inputs(12, 90, hq, hkv, d, dtype)
    begin, end = ranges(12, 90)
    end[3] = begin[3]  # no key at all
    got = ops.attention(q, k, v, begin, end, SCALE)
    torch.testing.assert_close(got, reference.attention(q, k, v, begin, end, SCALE), **TOLERANCE[dtype])
    assert not got[3].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hq", "hkv", "d"), HEADS)
def test_two_ranges_agree_with_the_reference(hq: int, hkv: int, d: int, dtype: torch.dtype) -> None:
    q, k, v = inputs(12, 90, hq, hkv, d, dtype)
    _, k2, v2 = inputs(12, 40, hq, hkv, d, dtype)
    (begin, end), (begin2, end2) = ranges(12, 90), ranges(12, 40)
    end[2], end2[4] = begin[2], begin2[4]
    end[7], end2[7] = begin[7], begin2[7]
    arguments = (q, k, v, begin, end, SCALE, k2, v2, begin2, end2)
    got = ops.attention(*arguments)
    torch.testing.assert_close(got, reference.attention(*arguments), **TOLERANCE[dtype])
    assert not got[7].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1000, 37])
@pytest.mark.parametrize(("hq", "hkv"), [(9, 3), (4, 4), (30, 1)])
def test_a_query_alone_equals_a_query_in_a_prefill(hq: int, hkv: int, window: int, dtype: torch.dtype) -> None:
    """Causal, and with a sliding window whose begin moves from query to query."""
    q, k, v = inputs(150, 150, hq, hkv, 64, dtype)
    end = torch.arange(1, 151)
    begin = (end - window).clamp_min(0)
    whole = ops.attention(q, k, v, begin, end, SCALE)
    for n in (1, 2, 3, 5, 6, 7, 8, 9, 33, 100):
        for first in (0, 40, 150 - n):
            part = slice(first, first + n)
            got = ops.attention(q[part], k, v, begin[part], end[part], SCALE)
            assert torch.equal(got, whole[part]), (n, first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_ignore_where_the_keys_lie_and_what_lies_beside_them(dtype: torch.dtype) -> None:
    q, k, v = inputs(5, 60, 6, 2, 32, dtype)
    begin, end = torch.zeros(5, dtype=torch.int64), torch.tensor([60, 59, 57, 60, 33])
    whole = ops.attention(q, k, v, begin, end, SCALE)
    for shift in (1, 7, 16, 100):
        arena = torch.full((shift + 80, 2, 32), torch.nan, dtype=dtype)
        arena_v = arena.clone()
        arena[shift : shift + 60], arena_v[shift : shift + 60] = k, v
        assert torch.equal(ops.attention(q, arena, arena_v, begin + shift, end + shift, SCALE), whole), shift
    assert not whole.isnan().any()


def test_nan_past_a_querys_end_stays_out_though_its_neighbour_sees_it() -> None:
    q, k, v = inputs(8, 40, 6, 2, 32, torch.float32)
    begin, end = torch.zeros(8, dtype=torch.int64), torch.arange(33, 41)
    clean = ops.attention(q, k, v, begin, end, SCALE)
    k[37], v[38] = torch.nan, torch.inf
    got = ops.attention(q, k, v, begin, end, SCALE)
    assert torch.equal(got[:5], clean[:5])
    assert got[5].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_ignore_how_the_keys_are_split_in_two_ranges(dtype: torch.dtype) -> None:
    q, k, v = inputs(7, 50, 6, 2, 64, dtype)
    zero = torch.zeros(7, dtype=torch.int64)
    end = torch.tensor([50, 50, 50, 50, 50, 49, 45])
    whole = ops.attention(q, k, v, zero, end, SCALE)
    for cut in (0, 1, 16, 33, 44):
        split = ops.attention(q, k, v, zero, zero + cut, SCALE, k[cut:], v[cut:], zero, end - cut)
        assert torch.equal(split, whole), cut


def test_a_block_of_slots_sees_itself_both_ways() -> None:
    """The draft model's use: every slot of a block shares the context and the whole block."""
    q, k, v = inputs(10, 30, 6, 2, 32, torch.float32)
    _, k2, v2 = inputs(10, 10, 6, 2, 32, torch.float32)
    begin, end = torch.tensor([0] * 5 + [12] * 5), torch.tensor([12] * 5 + [30] * 5)
    begin2, end2 = torch.tensor([0] * 5 + [5] * 5), torch.tensor([5] * 5 + [10] * 5)
    whole = ops.attention(q, k, v, begin, end, SCALE, k2, v2, begin2, end2)
    second = slice(5, 10)
    alone = ops.attention(
        q[second], k[12:30], v[12:30], begin[second] - 12, end[second] - 12, SCALE, k2[second], v2[second],
        begin2[second] - 5, end2[second] - 5,
    )  # fmt: skip
    assert torch.equal(alone, whole[second])


@pytest.mark.parametrize("n", [1, 6, 64])
def test_bits_ignore_the_thread_count(n: int, per_thread_count) -> None:
    q, k, v = inputs(n, 300, 9, 3, 64, torch.bfloat16)
    begin, end = torch.zeros(n, dtype=torch.int64), torch.arange(300 - n + 1, 301)
    first, *others = per_thread_count(lambda: ops.attention(q, k, v, begin, end, SCALE))
    assert all(torch.equal(first, other) for other in others)


def test_large_scores_and_equal_scores() -> None:
    q, k, v = inputs(2, 20, 2, 1, 16, torch.float32)
    begin, end = torch.zeros(2, dtype=torch.int64), torch.full((2,), 20)
    got = ops.attention(1e4 * q, k, v, begin, end, 1.0)
    torch.testing.assert_close(got, reference.attention(1e4 * q, k, v, begin, end, 1.0))
    flat = ops.attention(torch.zeros_like(q), k, v, begin, end, 1.0)
    torch.testing.assert_close(flat, v.mean(0).expand(2, 2, 16).contiguous())


def test_wrong_arguments_are_refused() -> None:
    q, k, v = inputs(2, 20, 4, 2, 16, torch.float32)
    zero = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(DsparkError, match="inside their tables"):
        ops.attention(q, k, v, zero, zero + 21, 1.0)
    with pytest.raises(DsparkError, match="inside their tables"):
        ops.attention(q, k, v, zero - 1, zero + 2, 1.0)
    with pytest.raises(DsparkError, match="k and v"):
        ops.attention(q, k.bfloat16(), v.bfloat16(), zero, zero, 1.0)
    with pytest.raises(DsparkError, match="divisible"):
        ops.attention(q[:, :3].contiguous(), k, v, zero, zero, 1.0)
    with pytest.raises(DsparkError, match="int64"):
        ops.attention(q, k, v, zero.int(), zero.int(), 1.0)
