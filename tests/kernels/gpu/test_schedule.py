"""The budget search in Triton: equal to plain Python, optimal by brute force, prefixes only."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from dspark_kernels.gpu.schedule import POLICIES, schedule, schedule_reference

TABLES = {
    "flat": lambda b: torch.full((b + 1,), 40.0),
    "falling": lambda b: 60.0 / (1 + 0.15 * torch.arange(b + 1)),
    "staircase": lambda b: 60.0 / (1 + 0.5 * (torch.arange(b + 1) // 4)),
    "ragged": lambda b: 30.0 + 10 * torch.rand(b + 1),
}


def survivals(requests: int, k: int) -> Tensor:
    """Prefix products, rounded to eighths in some rows so that there are ties; some blocks end early."""
    value = (0.4 + 0.6 * torch.rand(requests, k)).cumprod(-1)
    value[::3] = (value[::3] * 8).round() / 8
    lengths = torch.randint(k + 1, (requests, 1))
    return torch.where(torch.arange(k) < lengths, value, -1.0)


def theta(survival: Tensor, rate: Tensor, lengths: tuple[int, ...]) -> Fraction:
    total = sum(Fraction(x) for row, n in zip(survival.tolist(), lengths, strict=True) for x in row[:n])
    return (len(lengths) + total) * Fraction(rate[len(lengths) + sum(lengths)].item())


def rule(survival: Tensor, rate: Tensor, policy: str) -> list[int]:
    """The decision in words, with exact arithmetic."""
    requests = len(survival)
    drafts = [(-x, r, j) for r, row in enumerate(survival.tolist()) for j, x in enumerate(row) if x >= 0]
    order = [(r, j) for _, r, j in sorted(drafts)]
    steps = [(0,) * requests]
    for r, _ in order[: len(rate) - 1 - requests]:
        steps.append(tuple(n + (i == r) for i, n in enumerate(steps[-1])))
    values = [theta(survival, rate, lengths) for lengths in steps]
    if policy == "global":
        return list(steps[values.index(max(values))])
    n = 0
    while n + 1 < len(values) and values[n + 1] >= values[n]:
        n += 1
    return list(steps[n])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("requests", "k"), [(1, 1), (1, 5), (4, 3), (7, 5), (16, 4)])
def test_the_decision_in_words(requests: int, k: int, table: str, policy: str) -> None:
    for _ in range(3):
        survival, rate = survivals(requests, k), TABLES[table](requests * (k + 1))
        got = schedule(survival, rate, policy)
        assert torch.equal(got, schedule_reference(survival, rate, policy))
        assert got.tolist() == rule(survival, rate, policy)
        assert got.dtype == torch.int64


@pytest.mark.parametrize("table", TABLES)
def test_global_is_the_best_of_all_lengths(table: str) -> None:
    for _ in range(4):
        survival, rate = survivals(3, 3), TABLES[table](12)
        room = (survival >= 0).sum(-1).tolist()
        best = max(theta(survival, rate, lengths) for lengths in itertools.product(*(range(n + 1) for n in room)))
        assert theta(survival, rate, tuple(schedule(survival, rate, "global").tolist())) == best


def test_equal_survivals_are_admitted_in_order() -> None:
    """Room for 5 of 12 equal pairs: the first request's four, then one of the second's."""
    survival, rate = torch.full((3, 4), 0.5), torch.full((9,), 10.0)
    for policy in POLICIES:
        assert schedule(survival, rate, policy).tolist() == [4, 1, 0]


def test_certain_and_hopeless_drafts() -> None:
    """On a flat table every certain draft pays. One of survival 0 changes nothing: global takes the first of equals and
    leaves it, early_stop sees no drop and takes it. -0 is 0."""
    survival = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, -0.0, -0.0]])
    rate = torch.full((17,), 25.0)
    assert schedule(survival, rate, "global").tolist() == [2, 1, 3, 0]
    assert schedule(survival, rate, "early_stop").tolist() == [3, 3, 3, 3]
    assert schedule(torch.zeros(2, 3), rate, "global").tolist() == [0, 0]


def test_a_staircase_parts_the_policies() -> None:
    """Theta = 20, 19, 18.5, 18.25, then 41: the fourth row enters a faster graph. early_stop has stopped before it."""
    survival, rate = torch.tensor([[0.9, 0.8, 0.7, 0.7]]), torch.tensor([0.0, 20.0, 10.0, 7.0, 6.0, 10.0])
    assert schedule(survival, rate, "global").tolist() == [4]
    assert schedule(survival, rate, "early_stop").tolist() == [0]


def test_nothing_to_admit() -> None:
    rate = torch.full((9,), 5.0)
    for policy in POLICIES:
        assert schedule(torch.full((3, 2), -1.0), rate, policy).tolist() == [0, 0, 0]
        assert schedule(torch.ones(3, 2), rate[:4], policy).tolist() == [0, 0, 0], "a table without room"
        assert schedule(torch.empty(0, 2), rate, policy).tolist() == []
        assert schedule(torch.empty(2, 0), rate, policy).tolist() == [0, 0]
        assert schedule(torch.ones(3, 2), torch.tensor([1.0, 1, 1, 1, 0.1, 0.1, 0.1, 0.1, 0.1]), policy).tolist() == [
            0,
            0,
            0,
        ]


@pytest.mark.parametrize("policy", POLICIES)
def test_many_requests(policy: str) -> None:
    survival = survivals(30, 7)
    rate = TABLES["falling"](30 * 8)
    got = schedule(survival, rate, policy)
    assert torch.equal(got, schedule_reference(survival, rate, policy))
    assert 0 < got.sum() < (survival >= 0).sum(), "inconclusive"


def test_wrong_arguments() -> None:
    survival, rate = torch.ones(3, 2), torch.ones(10)
    with pytest.raises(ValueError, match="expected a policy"):
        schedule(survival, rate, "fixed")
    with pytest.raises(ValueError, match="Measure a longer table"):
        schedule(survival, rate[:3], "global")
    with pytest.raises(ValueError, match="at most 4096 pairs"):
        schedule(torch.ones(513, 5), torch.ones(6000), "global")
