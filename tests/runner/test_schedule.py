"""Policies over confidences: what they promise under the table's own model, on tables of every shape."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.contracts import MTPPredictInfo
from dspark.runner.curve import CapacityCurve
from dspark.runner.schedule import (
    NEEDS_CURVE,
    POLICIES,
    Scheduler,
    best,
    early_stop,
    fill,
    fixed,
    survivals,
    threshold,
)

RATES = st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.5, 1.0]))
BLOCKS = st.lists(st.lists(RATES, max_size=4), min_size=1, max_size=4)
STEPS = st.lists(st.sampled_from([0.0, 0.0, 0.1, 1.0]), min_size=20, max_size=20)


def infos(blocks: list[list[float]]) -> list[MTPPredictInfo]:
    return [MTPPredictInfo(tuple(range(len(b))), tuple(b)) for b in blocks]


def curve(steps: list[float]) -> CapacityCurve:
    """Flat where a step is 0, a staircase where few are not."""
    return CapacityCurve(tuple(range(1, 21)), tuple(np.cumsum([1.0, *steps[1:]]).tolist()))


def tokens_per_second(survival: np.ndarray, lengths: Sequence[int], seconds: np.ndarray) -> float:
    """What the model behind all of this expects of some lengths."""
    chosen = survival[np.arange(survival.shape[1]) < np.asarray(lengths)[:, None]]
    return float((len(survival) + chosen.sum()) / seconds[len(chosen)])


def every_choice(blocks: list[list[float]]) -> itertools.product:
    return itertools.product(*(range(len(b) + 1) for b in blocks))


@given(BLOCKS, STEPS)
@settings(max_examples=200, deadline=None)
def test_global_is_the_best_there_is_and_shortest_of_equals(blocks: list[list[float]], steps: list[float]) -> None:
    survival = survivals(infos(blocks), 4)
    seconds = curve(steps).rounds(len(blocks), survival.size)
    chosen = best(survival, seconds)
    reached = tokens_per_second(survival, chosen, seconds)
    assert all(0 <= n <= len(b) for n, b in zip(chosen, blocks, strict=True))
    for other in every_choice(blocks):
        rate = tokens_per_second(survival, other, seconds)
        assert rate <= reached * (1 + 1e-12)
        if rate > reached * (1 - 1e-15):
            assert sum(other) >= sum(chosen) or rate < reached


@given(BLOCKS, STEPS, st.integers(0, 20))
@settings(max_examples=200, deadline=None)
def test_lengths_are_of_prefixes_within_the_budget(blocks: list[list[float]], steps: list[float], budget: int) -> None:
    """A draft is admitted only where every draft of a larger survival is, so a block's are a prefix of it."""
    survival = survivals(infos(blocks), 4)
    filled = fill(survival, budget)
    assert sum(filled) == min(budget, sum(map(len, blocks)))
    seconds = curve(steps).rounds(len(blocks), survival.size)
    for lengths in (filled, early_stop(survival, seconds), best(survival, seconds)):
        taken = [survival[r, k] for r, n in enumerate(lengths) for k in range(n)]
        left = [survival[r, k] for r, n in enumerate(lengths) for k in range(n, len(blocks[r]))]
        assert all(0 <= n <= len(b) for n, b in zip(lengths, blocks, strict=True))
        assert min(taken, default=1.0) >= max(left, default=0.0)


@given(BLOCKS, st.floats(0.001, 1.0), st.floats(0.0, 0.2))
@settings(max_examples=100, deadline=None)
def test_early_stop_is_the_best_where_the_curve_has_no_steps(
    blocks: list[list[float]], first: float, slope: float
) -> None:
    """On a straight line tokens per second rise, then fall: the first fall ends at the top."""
    survival = survivals(infos(blocks), 4)
    seconds = first + slope * np.arange(survival.size + 1)
    rate = tokens_per_second(survival, early_stop(survival, seconds), seconds)
    assert rate == pytest.approx(tokens_per_second(survival, best(survival, seconds), seconds), rel=1e-12)


@given(BLOCKS, st.lists(st.booleans(), min_size=4, max_size=4), STEPS, st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_what_drafting_is_worth_is_what_the_lengths_would_give(
    blocks: list[list[float]], by_model: list[bool], steps: list[float], requests: int
) -> None:
    """The gate's verdict on rounds of kept blocks, against rounds of them one by one."""
    line = curve(steps)
    line = CapacityCurve(line.rows, line.seconds, (1, 8), (0.3, 0.9))
    scheduler = Scheduler("global", 4, curve=line)
    survival, modelled = survivals(infos(blocks), 4), np.array(by_model[: len(blocks)])
    spent = {True: 0.0, False: 0.0}
    gained = {True: 0.0, False: 0.0}
    rounds = max(1, len(blocks) // requests)
    for i in range(rounds):
        chosen = [(len(blocks) - rounds * requests + i * requests + j) % len(blocks) for j in range(requests)]
        for asked in (True, False):
            part = np.where(modelled[chosen][:, None] & (not asked), -1.0, survival[chosen])
            seconds = line.passes(requests + part.size)[requests:] + asked * line.drafting(int(modelled[chosen].sum()))
            lengths = best(part, seconds)
            spent[asked] += seconds[sum(lengths)]
            gained[asked] += tokens_per_second(part, lengths, seconds) * seconds[sum(lengths)]
    expected = gained[True] / spent[True] / (gained[False] / spent[False])
    assert scheduler._worth(requests, survival.copy(), modelled) == pytest.approx(expected, rel=1e-9)


def test_a_staircase_stops_early_stop_and_not_global() -> None:
    """Three rows cost as four do. One draft is not worth the step, three are."""
    survival = survivals(infos([[0.9, 0.81, 0.7]]), 3)
    seconds = np.array([1.0, 2.0, 2.0, 2.0])
    assert early_stop(survival, seconds) == [0]
    assert best(survival, seconds) == [3]


def test_padded_sizes_are_steps() -> None:
    padded = CapacityCurve((1, 4, 8), (1.0, 2.0, 3.0), padded=True)
    assert padded.passes(9).tolist() == [1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.25]
    assert CapacityCurve((1, 4, 8), (1.0, 2.5, 2.0)).passes(6).tolist() == pytest.approx([1, 1, 1.5, 2, 2.5, 2.5, 2.5])


def test_threshold_looks_at_one_request_alone() -> None:
    survival = survivals(infos([[0.98, 0.95, 0.41, 0.12], [0.2], [], [1.0, 0.0, 1.0]]), 4)
    assert survival[0].tolist() == pytest.approx([0.98, 0.931, 0.38171, 0.0458052])  # the course's own example
    assert threshold(survival, 0.3) == [3, 0, 0, 1]
    assert threshold(survival, 0.0) == [4, 1, 0, 3]
    assert threshold(survivals(infos([[0.9] * 4]), 2), 0.0) == [2]


def test_the_courses_toy_rule() -> None:
    """p * 3 - 1 > 0 per token, no other request, no curve: two of 0.9, 0.6, 0.3, 0.1 pay. As a threshold on each alone
    it is a toy: the survival of the second is 0.54, of the third 0.16."""
    rates = [0.9, 0.6, 0.3, 0.1]
    assert sum(p * 3 - 1 > 0 for p in rates) == 2
    assert threshold(survivals(infos([rates]), 4), 1 / 3) == [2]


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("policy", ["early_stop", "global", "lagged_global", "threshold"])
def test_equal_confidences(policy: str, rate: float) -> None:
    """Of equals the earlier request's come first; a sure rejection is never worth a row, a sure acceptance always."""
    scheduler = Scheduler(policy, 3, 0.1, CapacityCurve((1, 30), (1.0, 3.0)))
    blocks = infos([[rate] * 3] * 5)
    for _ in range(3):
        lengths = scheduler.lengths(blocks)
    assert lengths == ([0] * 5 if rate == 0.0 else [3] * 5 if rate == 1.0 else lengths)
    assert sorted(lengths, reverse=True) == lengths


@pytest.mark.parametrize("policy", NEEDS_CURVE)
@pytest.mark.parametrize("table", [None, CapacityCurve((1, 64), (1.0, 1.01)), CapacityCurve((8,), (1.0,))])
def test_without_a_curve_everything_is_verified_and_said(policy: str, table: CapacityCurve | None) -> None:
    scheduler = Scheduler(policy, 3, curve=table)
    assert scheduler.told is not None
    assert "dspark profile" in scheduler.told
    assert scheduler.lengths(infos([[0.1, 0.1], [], [0.9] * 4])) == [2, 0, 3]


def test_lagged_global_takes_the_budget_of_two_rounds_ago() -> None:
    scheduler = Scheduler("lagged_global", 4, curve=CapacityCurve((1, 100), (1.0, 8.0)))
    sure, doubtful = infos([[0.99] * 4] * 2), infos([[0.01] * 4] * 2)
    assert scheduler.lengths(sure) == [4, 4]  # nothing to go by yet: all
    assert scheduler.lengths(doubtful) == [4, 4]
    assert scheduler.lengths(doubtful) == [4, 4]  # the first round's confidences
    assert scheduler.lengths(sure) == [0, 0]  # the second's
    assert scheduler.lengths(sure[:1]) == [0]
    assert scheduler.lengths(infos([[0.9, 0.1], [0.8] * 4, []])) == [2, 4, 0]  # two requests' budget for three


def test_a_batch_that_drains_and_requests_without_drafts() -> None:
    table = CapacityCurve((1, 100), (1.0, 8.0))
    for policy in ("fixed", "threshold", "early_stop", "lagged_global", "global"):
        scheduler = Scheduler(policy, 4, 0.5, table)
        for count in range(6, -1, -1):
            blocks = infos([[0.7] * (r % 5) for r in range(count)])
            lengths = scheduler.lengths(blocks, other_rows=count)
            assert len(lengths) == count
            assert all(0 <= n <= len(b.token_ids) for n, b in zip(lengths, blocks, strict=True))


def test_fixed_is_what_its_name_says() -> None:
    assert fixed(infos([[0.1] * 3, [], [0.1]]), 2) == [2, 0, 1]


def test_a_full_machine_verifies_less() -> None:
    """The same confidences: on a curve that is flat up to 16 rows and steep behind it, few requests verify all."""
    table = CapacityCurve((1, 16, 64), (1.0, 1.05, 8.0))
    scheduler = Scheduler("global", 4, curve=table)
    few, many = infos([[0.6] * 4] * 3), infos([[0.6] * 4] * 14)
    assert scheduler.lengths(few) == [4] * 3
    assert sum(scheduler.lengths(many)) <= 6
    assert sum(scheduler.lengths(few, other_rows=13)) < 12  # prompts fill the machine as well


@pytest.mark.parametrize("policy", ["early_stop", "lagged_global", "global"])
def test_256_requests_are_scheduled_in_200_microseconds(policy: str) -> None:
    """All of it: from the runner's records to lengths. The best of many calls, for a machine that has other things to
    do; docs/scheduling.md has the medians of one that has not."""
    rng = np.random.default_rng(0)
    blocks = infos(rng.random((256, 7)).tolist())
    scheduler = Scheduler(policy, 7, curve=CapacityCurve((1, 64, 2048), (1.0, 2.0, 30.0), (1, 256), (0.1, 0.5)))
    times = []
    for _ in range(300):
        begin = time.perf_counter()
        lengths = scheduler.lengths(blocks)
        times.append(time.perf_counter() - begin)
    assert 0 < sum(lengths) < 256 * 7
    assert min(times) < 300e-6


def test_requests_without_drafts_and_equal_survivals() -> None:
    table = CapacityCurve((1, 4, 64), (1.0, 1.1, 9.0))
    for policy in POLICIES:
        assert Scheduler(policy, 4, 0.5, table).lengths([MTPPredictInfo((), None)] * 3) == [0, 0, 0]
    survival = survivals(infos([[1.0, 1.0], [1.0, 1.0], [0.5, 1.0]]), 2)
    assert [fill(survival, n) for n in range(7)] == [
        [0, 0, 0], [1, 0, 0], [2, 0, 0], [2, 1, 0], [2, 2, 0], [2, 2, 1], [2, 2, 2],
    ]  # fmt: skip


@pytest.mark.parametrize(("before", "now"), [(1, 20), (20, 1), (4, 8), (8, 4)])
def test_lagged_global_weighs_old_confidences_at_todays_cost(before: int, now: int) -> None:
    """With the same confidences in every round it is `global`, however the batch has grown or drained since."""
    table = CapacityCurve((1, 6, 20, 80), (1.0, 1.05, 2.0, 12.0))
    for prompt_rows in (0, 30):
        lagged = Scheduler("lagged_global", 3, curve=table)
        for _ in range(2):
            lagged.lengths(infos([[0.6, 0.6, 0.6]] * before))
        today = infos([[0.6, 0.6, 0.6]] * now)
        wanted = Scheduler("global", 3, curve=table).lengths(today, prompt_rows)
        assert abs(sum(lagged.lengths(today, prompt_rows)) - sum(wanted)) <= max(1, now // before)
