"""split_by_hash: disjoint, complete, close to the shares, and blind to order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.contracts import DsparkError
from dspark.corpus.splits import split_by_hash

SHARES = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=5)


@given(count=st.integers(0, 300), weights=SHARES)
def test_disjoint_complete_and_near_the_shares(count: int, weights: list[float]) -> None:
    ids = [f"row {i}" for i in range(count)]
    shares = {f"split {i}": weight for i, weight in enumerate(weights)}
    parts = split_by_hash(ids, shares)
    assert list(parts) == list(shares)
    assert sorted(name for part in parts.values() for name in part) == sorted(ids)
    for name, share in shares.items():
        assert abs(len(parts[name]) - count * share / sum(weights)) <= 1.001


def test_the_case_that_overlapped_elsewhere() -> None:
    parts = split_by_hash(map(str, range(12501)), {"train": 0.8, "test": 0.2})
    assert [len(part) for part in parts.values()] == [10001, 2500]
    assert not set(parts["train"]) & set(parts["test"])


def test_order_does_not_matter_and_salt_does() -> None:
    ids = [str(i) for i in range(100)]
    shares = {"train": 3, "test": 1}
    assert split_by_hash(ids, shares) == split_by_hash(ids[::-1], shares)
    assert split_by_hash(ids, shares) != split_by_hash(ids, shares, salt="other")


@pytest.mark.parametrize("shares", [{}, {"a": 0.0}, {"a": 1.0, "b": -1.0}, {"a": float("nan")}])
def test_shares_must_be_positive(shares: dict[str, float]) -> None:
    with pytest.raises(DsparkError, match="positive"):
        split_by_hash(["x"], shares)


def test_duplicates_are_refused() -> None:
    with pytest.raises(DsparkError, match="duplicates"):
        split_by_hash(["x", "x"], {"a": 1.0})
