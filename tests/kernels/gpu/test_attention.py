"""Attention in Triton: values to fp64, and a query's bits alone, in batches, in tiles, elsewhere in the arena."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_kernels import reference
from dspark_kernels.gpu import attention as module
from dspark_kernels.gpu.attention import SPLIT, attention, queries_of_tile, tiles_of

SCALE = 0.3
KINDS = [torch.float32, torch.bfloat16]
# fp32: sums of 300 terms. bf16: weights are rounded (the interpreter truncates: 8e-3), then the output is.
RTOL = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
ATOL = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
NAN = float("nan")


def heads(n: int, count: int, d: int, kind: torch.dtype) -> Tensor:
    return torch.randn(n, count, d).to(kind)


def lone(rows: int, at: list[int], kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """k and v [rows, 1, 16], NaN but for the rows first:last of ``at``."""
    k, v = (torch.full((rows, 1, 16), NAN, dtype=kind) for _ in range(2))
    k[at[0] : at[1]], v[at[0] : at[1]] = heads(at[1] - at[0], 1, 16, kind), heads(at[1] - at[0], 1, 16, kind)
    return k, v


def close(got: Tensor, q: Tensor, *arguments: Any, **second: Any) -> None:
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments]
    second = {key: a.double() if a.is_floating_point() else a for key, a in second.items()}
    expected = reference.attention(q.double(), *wide, **second)
    torch.testing.assert_close(got.double(), expected, rtol=RTOL[q.dtype], atol=ATOL[q.dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hq", "hkv", "d"), [(6, 2, 20), (1, 1, 80), (3, 3, 16)])
def test_one_range_against_fp64(hq: int, hkv: int, d: int, kind: torch.dtype) -> None:
    """No key, one key, a window, exactly one split, parts of two."""
    begin, end = torch.tensor([0, 3, 250, 0, 10]), torch.tensor([0, 4, 261, SPLIT, 310])
    q, k, v = heads(5, hq, d, kind), heads(310, hkv, d, kind), heads(310, hkv, d, kind)
    got = attention(q, k, v, begin, end, SCALE)
    close(got, q, k, v, begin, end, SCALE)
    assert torch.equal(got[0], torch.zeros(hq, d, dtype=kind))


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranges_against_fp64(kind: torch.dtype) -> None:
    """A block that sees a context and itself: both, either one, neither; and one key of each, with an empty split
    between them and scores of either sign."""
    begin, end = torch.tensor([0, 0, 5, 9, 5]), torch.tensor([300, 40, 5, 9, 6])
    begin2, end2 = torch.tensor([0, 7, 7, 3, 3]), torch.tensor([7, 7, 14, 3, 4])
    q, k, v = heads(5, 6, 16, kind), heads(300, 2, 16, kind), heads(300, 2, 16, kind)
    second = {"k2": heads(14, 2, 16, kind), "v2": heads(14, 2, 16, kind), "begin2": begin2, "end2": end2}
    got = attention(q, k, v, begin, end, SCALE, **second)
    close(got, q, k, v, begin, end, SCALE, **second)
    assert torch.equal(got[3], torch.zeros(6, 16, dtype=kind))
    assert torch.equal(got[1], attention(q[1:2], k, v, begin[1:2], end[1:2], SCALE)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_wide_heads_and_large_groups(kind: torch.dtype) -> None:
    begin, end = torch.zeros(1, dtype=torch.int64), torch.tensor([9])
    for hq, d in ((1, 256), (70, 16)):
        q, k, v = heads(1, hq, d, kind), heads(9, 1, d, kind), heads(9, 1, d, kind)
        close(attention(q, k, v, begin, end, SCALE), q, k, v, begin, end, SCALE)


@pytest.mark.parametrize("kind", KINDS)
def test_one_key_is_its_value(kind: torch.dtype) -> None:
    """And no other row of its split enters, whatever it holds."""
    (k, v), at = lone(300, [200, 201], kind), torch.tensor([200])
    got = attention(heads(1, 3, 16, kind), k, v, at, at + 1, SCALE, base=torch.tensor([0]))
    assert torch.equal(got, v[200:201].expand(1, 3, 16))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_scores_of_minus_infinity_and_broken_keys() -> None:
    """A key of score -inf weighs nothing; a NaN among the keys a query sees comes out."""
    q, k, v = torch.ones(1, 1, 16), torch.zeros(3, 1, 16), heads(3, 1, 16, torch.float32)
    k[1, 0, 0] = -float("inf")
    begin, end = torch.tensor([1]), torch.tensor([3])
    assert torch.equal(attention(q, k, v, begin, end, SCALE), v[2:3])
    for broken in (k, v):
        broken[2] = NAN
        assert attention(q, k, v, begin, end, SCALE).isnan().all()
        broken[2] = 0


@pytest.mark.usefixtures("_plain_dot")
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_ignores_the_others(kind: torch.dtype) -> None:
    """Fewer queries in fp32, which walks more blocks: the interpreter is slow."""
    n = 32 if kind == torch.bfloat16 else 9
    lengths = torch.randint(0, 40, (n,))
    end = lengths.cumsum(0)
    begin, rows = end - lengths, int(lengths.sum())
    q, k, v = heads(n, 3, 16, kind), heads(rows, 1, 16, kind), heads(rows, 1, 16, kind)
    whole = attention(q, k, v, begin, end, SCALE, longest=40)
    for some in [torch.tensor([5]), *(torch.arange(n)[-i:] for i in (2, 7, 8)), torch.randperm(n)[:9]]:
        longest = None if len(some) == 8 else 40
        assert torch.equal(attention(q[some], k, v, begin[some], end[some], SCALE, longest=longest), whole[some])


@pytest.mark.usefixtures("_plain_dot")
@pytest.mark.parametrize(("window", "kind"), [(0, torch.bfloat16), (10, torch.bfloat16), (10, torch.float32)])
def test_tiles_of_any_cut(window: int, kind: torch.dtype) -> None:
    """Prefill of two sequences, the first around the border of two splits: with the window, its late queries see no key
    of the split that its early ones see, and with either, its early queries none of the second."""
    counts, group = [7, 2], 3
    base = torch.tensor([0] * 7 + [270] * 2)
    end = torch.cat((torch.arange(253, 260), torch.arange(271, 273)))
    begin = torch.maximum(base, end - window) if window else base
    q, k, v = heads(9, group, 16, kind), heads(280, 1, 16, kind), heads(280, 1, 16, kind)
    alone = attention(q, k, v, begin, end, SCALE, base=base)
    close(alone, q, k, v, begin, end, SCALE)
    for tiles in (tiles_of(counts, group), torch.tensor([[0, 5], [5, 1], [6, 1], [7, 2]])):
        assert torch.equal(attention(q, k, v, begin, end, SCALE, base=base, tiles=tiles), alone)


@pytest.mark.usefixtures("_plain_dot")
@pytest.mark.parametrize("kind", KINDS)
def test_draft_blocks_in_tiles(kind: torch.dtype) -> None:
    """Two blocks of three queries that see their context and, both ways, their block."""
    begin, end = torch.tensor([0, 30]).repeat_interleave(3), torch.tensor([30, 47]).repeat_interleave(3)
    first = torch.tensor([0, 3]).repeat_interleave(3)
    q, k, v, k2, v2 = (heads(n, h, 16, kind) for n, h in ((6, 3), (47, 1), (47, 1), (6, 1), (6, 1)))
    given = (k, v, begin, end, SCALE, k2, v2, first, first + 3)
    alone = attention(q, *given)
    close(alone, q, *given)
    assert torch.equal(attention(q, *given, tiles=tiles_of([3, 3], 3)), alone)


@pytest.mark.usefixtures("_plain_dot")
@pytest.mark.parametrize("kind", KINDS)
def test_place_in_the_arena_and_what_lies_around(kind: torch.dtype) -> None:
    """The same keys from row 0 and from row 37 of an arena of NaN; ranks count from base, so a window moves along."""
    q, (k, v) = heads(2, 3, 16, kind), lone(300, [0, 270], kind)
    begin, end = torch.tensor([0, 200]), torch.tensor([270, 269])
    here = attention(q, k, v, begin, end, SCALE, base=torch.zeros_like(begin))
    assert not here.isnan().any()
    far_k, far_v = (torch.cat((torch.full((37, 1, 16), NAN, dtype=kind), t)) for t in (k, v))
    there = attention(q, far_k, far_v, begin + 37, end + 37, SCALE, base=torch.full_like(begin, 37), longest=270)
    assert torch.equal(here, there)


@pytest.mark.usefixtures("_plain_dot")
def test_bounds_and_slabs_are_only_about_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """More splits than there are keys; and a workspace that holds one split at a time, joined as it goes."""
    q, k, v = heads(2, 1, 16, torch.float32), heads(520, 1, 16, torch.float32), heads(520, 1, 16, torch.float32)
    begin, end, none = torch.tensor([0, 0]), torch.tensor([520, 260]), torch.tensor([0, 0])
    given = (q, k, v, begin, end, SCALE, k[:9], v[:9], none, none + 9)
    whole = attention(*given)
    assert torch.equal(attention(*given, longest=1000, longest2=300), whole)
    monkeypatch.setattr(module, "MAX_WORKSPACE", 0)
    assert torch.equal(attention(*given), whole)


def test_tiles_cover_every_query_once() -> None:
    for counts, group in ([[14, 0, 65], 3], [[1], 70], [[40], 1]):
        tiles = tiles_of(counts, group)
        covered = [first + i for first, count in tiles.tolist() for i in range(count)]
        assert covered == list(range(sum(counts)))
        assert tiles[:, 1].max() <= queries_of_tile(group)
    assert tiles_of([], 2).shape == (0, 2)


def test_a_tile_that_is_too_long_gives_nan() -> None:
    n = queries_of_tile(30) + 3
    q, k, v = heads(n, 30, 16, torch.float32), heads(n, 1, 16, torch.float32), heads(n, 1, 16, torch.float32)
    begin, end = torch.zeros(n, dtype=torch.int64), torch.arange(1, n + 1)
    got = attention(q, k, v, begin, end, SCALE, tiles=torch.tensor([[0, n]]))
    lost = got.isnan().all(-1)
    assert torch.equal(lost.flatten(), torch.arange(n * 30) >= 64)
    close(got[: queries_of_tile(30)], q[:2], k, v, begin[:2], end[:2], SCALE)


def test_no_queries_and_wrong_arguments() -> None:
    q, k, v = heads(2, 4, 16, torch.float32), heads(9, 2, 16, torch.float32), heads(9, 2, 16, torch.float32)
    begin, end = torch.tensor([0, 0]), torch.tensor([9, 9])
    assert attention(q[:0], k, v, begin[:0], end[:0], SCALE).shape == (0, 4, 16)
    assert torch.equal(attention(q, k[:0], v[:0], begin, begin, SCALE), torch.zeros_like(q))
    for wrong in [(q, k, v[:8], begin, end), (q, k, v, begin.int(), end), (q[:, :3], k, v, begin, end)]:
        with pytest.raises(ValueError, match="attention: expected"):
            attention(*wrong, SCALE)
    with pytest.raises(ValueError, match="expected tiles"):
        attention(q, k, v, begin, end, SCALE, tiles=torch.tensor([[0, 1, 2]]))
    with pytest.raises(ValueError, match="D from 1 to 256"):
        attention(torch.zeros(1, 1, 300), torch.zeros(1, 1, 300), torch.zeros(1, 1, 300), begin[:1], end[:1], SCALE)
