"""Shaping, Gumbel-argmax, uniforms, log-probabilities: values, exact laws, and bits that ignore the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dspark import noise, ops, probability
from dspark.contracts import DsparkError
from dspark_kernels import reference

V = 49152
CASES = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.0, 3, 0.5, 0.1),
    (1.0, 5, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.2, 0, 0.9, 0.0),
    (1.3, 50, 0.95, 0.01),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (2.0, 7, 0.3, 0.5),
    (1.0, 10**9, 0.999, 0.0),
    (1e-4, 40, 0.99, 0.0),
]


def params(cases: list[tuple[float, int, float, float]]) -> tuple[torch.Tensor, ...]:
    columns = zip(*cases, strict=True)
    kinds = (torch.float32, torch.int64, torch.float32, torch.float32)
    return tuple(torch.tensor(c, dtype=kind) for c, kind in zip(columns, kinds, strict=True))


def numpy_law(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The law as a loop over tokens, most likely first."""
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    law = np.zeros(len(logits))
    if temperature == 0:
        law[order[0]] = 1.0
        return law
    weight = {v: math.exp((logits[v] - logits[order[0]]) / temperature) for v in order}
    kept = order[:top_k] if top_k else order
    mass, nucleus = 0.0, []
    for v in kept:
        if nucleus and top_p < 1 and mass >= top_p * sum(weight[u] for u in kept):
            break
        nucleus.append(v)
        mass += weight[v]
    final = [v for v in nucleus if weight[v] >= min_p]
    for v in final:
        law[v] = weight[v] / sum(weight[u] for u in final)
    return law


@pytest.mark.parametrize("v", [1, 5, 13, 64, 200])
def test_shaping_is_the_law_in_words(v: int) -> None:
    logits = 3 * torch.randn(len(CASES), v)
    got = ops.shape_probs(logits, *params(CASES))
    for n, case in enumerate(CASES):
        expected = numpy_law(logits[n].double().numpy(), *(float(c) if i != 1 else c for i, c in enumerate(case)))
        np.testing.assert_allclose(got[n].numpy(), expected, rtol=2e-5, atol=1e-7, err_msg=str(case))


@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
def test_shaping_at_full_vocabulary(spread: float) -> None:
    logits = spread * torch.randn(len(CASES), V)
    got, expected = ops.shape_probs(logits, *params(CASES)), reference.shape_probs(logits, *params(CASES))
    for n, case in enumerate(CASES):
        # the cumulative mass rounds differently at the border: marginal tokens may move
        moved = (got[n] > 0) != (expected[n] > 0)
        assert (got[n] + expected[n])[moved].sum() < 5e-6, case
        assert (got[n] - expected[n]).abs().max() <= 2e-5 * expected[n].max(), case
        assert abs(float(got[n].double().sum()) - 1) < 1e-5, case
    twin = probability.shape(logits.double(), *(p.double() if p.is_floating_point() else p for p in params(CASES)))
    assert (twin - expected.double()).abs().max() < 1e-6


def test_shaping_ties_keep_the_lower_ids() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0, -0.0, 0.0, -0.0, 0.0]])
    t, one, zero = torch.ones(2), torch.ones(2), torch.zeros(2)
    kept = ops.shape_probs(logits, t, torch.tensor([2, 3]), one, zero) > 0
    assert kept.tolist() == [[False, True, True, False, False], [True, True, True, False, False]]
    nucleus = ops.shape_probs(logits, t, torch.zeros(2, dtype=torch.int64), torch.full((2,), 0.5), zero) > 0
    assert nucleus[1].tolist() == [True, True, True, False, False]
    greedy = ops.shape_probs(logits, zero, torch.tensor([2, 3]), one, zero)
    assert greedy.argmax(-1).tolist() == [1, 0]
    assert greedy.sum() == 2


@pytest.mark.parametrize("v", [9, 2000])
def test_equal_logits_and_minus_infinity(v: int) -> None:
    logits = torch.zeros(len(CASES), v)
    got = ops.shape_probs(logits, *params(CASES))
    for n, case in enumerate(CASES):
        support = int((got[n] > 0).sum())
        assert torch.equal(got[n, :support], got[n, :1].expand(support)), case
        if case[0] and not case[1] and case[2] == 1:
            assert support == v
    logits[:, 3:] = -torch.inf
    got = ops.shape_probs(logits, *params(CASES))
    assert not got[:, 3:].any()
    torch.testing.assert_close(got.sum(-1), torch.ones(len(CASES)))


@pytest.mark.parametrize("v", [77, V])
def test_shaping_and_logprobs_ignore_the_batch_and_the_threads(v: int, per_thread_count) -> None:
    rows = CASES + CASES[::-1] + CASES[:5]
    logits, arguments = 3 * torch.randn(len(rows), v), params(rows)
    ids = torch.randint(0, v, (len(rows),))
    for call in (
        lambda s: ops.shape_probs(logits[s], *(a[s] for a in arguments)),
        lambda s: ops.raw_logprob(logits[s], ids[s]),
    ):
        whole, *others = per_thread_count(lambda call=call: call(slice(None)))
        assert all(torch.equal(whole, other) for other in others)
        for n in (1, 2, 7, 16):
            assert torch.equal(call(slice(9, 9 + n)), whole[9 : 9 + n])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_are_refused(bad: float) -> None:
    for column in (0, 39):
        logits = torch.zeros(2, 40)
        logits[1, column] = bad
        with pytest.raises(DsparkError, match="NaN"):
            ops.shape_probs(logits, *params(CASES[:2]))
        with pytest.raises(DsparkError, match="NaN"):
            ops.raw_logprob(logits, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(DsparkError, match="finite"):
        ops.shape_probs(torch.full((1, 4), -torch.inf), *params(CASES[:1]))


@pytest.mark.parametrize("kind", ["flat", "peaked", "sparse", "steep", "one"])
@pytest.mark.parametrize("v", [5, 100, V])
def test_gumbel_argmax_is_the_argmax_of_all_tokens(v: int, kind: str) -> None:
    """Skipping tokens that cannot win never changes who wins."""
    rows = 40 if v < V else 6
    logits = torch.randn(rows, v) * {"flat": 0.01, "peaked": 2.0, "sparse": 1.0, "steep": 12.0, "one": 1.0}[kind]
    probs = logits.softmax(-1)
    if kind == "sparse":
        probs = probs * (torch.rand(rows, v) < 0.02)
    if kind == "one":
        probs = torch.zeros(rows, v).scatter(1, torch.randint(0, v, (rows, 1)), 1.0)
    probs[:, -1] += 1e-20
    seeds, positions = torch.randint(0, 2**63 - 1, (rows,)), torch.randint(0, 100000, (rows,))
    drawn = noise.gumbel(seeds, noise.DRAFT, positions, torch.arange(v))
    index = ops.gumbel_argmax(probs, seeds, noise.DRAFT, positions)
    assert torch.equal(index, reference.gumbel_argmax(probs, drawn))


def test_gumbel_argmax_on_a_reduced_vocabulary_sees_the_same_noise() -> None:
    ids = torch.randperm(V)[:5000].sort().values
    probs = (2 * torch.randn(20, 5000)).softmax(-1)
    full = torch.zeros(20, V)
    full[:, ids] = probs
    seeds, positions = torch.arange(20) * 7919, torch.arange(20)
    reduced = ops.gumbel_argmax(probs, seeds, noise.TARGET, positions, ids)
    assert torch.equal(ids[reduced], ops.gumbel_argmax(full, seeds, noise.TARGET, positions))


def test_gumbel_argmax_ignores_the_batch_and_the_threads(per_thread_count) -> None:
    probs = torch.randn(33, 3000).softmax(-1)
    seeds, positions = torch.arange(33), torch.arange(33) + 5
    whole, *others = per_thread_count(lambda: ops.gumbel_argmax(probs, seeds, 0, positions))
    assert all(torch.equal(whole, other) for other in others)
    for n in (1, 8, 20):
        assert torch.equal(
            ops.gumbel_argmax(probs[3 : 3 + n], seeds[3 : 3 + n], 0, positions[3 : 3 + n]), whole[3 : 3 + n]
        )


def test_gumbel_argmax_draws_the_law() -> None:
    """Chi-square with 4 degrees of freedom over 60,000 draws; 23.5 is its 0.9999 quantile."""
    law, draws = torch.tensor([0.5, 0.25, 0.15, 0.08, 0.02]), 60000
    positions = torch.arange(draws)
    index = ops.gumbel_argmax(law.expand(draws, 5).contiguous(), torch.full((draws,), 12345), 0, positions)
    expected = law * draws
    assert float(((torch.bincount(index, minlength=5) - expected) ** 2 / expected).sum()) < 23.5


def test_gumbel_argmax_refuses_an_empty_support() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.0, 0.0]])
    with pytest.raises(DsparkError, match="1 of 2 rows"):
        ops.gumbel_argmax(probs, torch.zeros(2, dtype=torch.int64), 0, torch.zeros(2, dtype=torch.int64))


def test_streams_positions_and_seeds_change_the_draw() -> None:
    probs = torch.full((1, 1000), 1e-3)
    zero = torch.zeros(1, dtype=torch.int64)
    draws = [
        int(ops.gumbel_argmax(probs, zero + seed, stream, zero + position))
        for seed in (0, 1, 2**40)
        for stream in range(4)
        for position in (0, 1)
    ]
    assert len(set(draws)) > 20


def test_log_probabilities() -> None:
    logits, ids = 4 * torch.randn(6, V), torch.randint(0, V, (6,))
    torch.testing.assert_close(ops.raw_logprob(logits, ids), reference.raw_logprob(logits, ids), rtol=2e-6, atol=2e-6)
    probs = logits.softmax(-1)
    probs[2, ids[2]] = 0.0
    probs[3, ids[3]] = 1e-41  # subnormal
    got = ops.log_of(probs, ids)
    assert got[2] == -torch.inf
    torch.testing.assert_close(got, reference.log_of(probs, ids), rtol=1e-6, atol=1e-6)
    assert ops.log_of(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)) == 0
    for op in (ops.raw_logprob, ops.log_of):
        with pytest.raises(DsparkError, match="inside their tables"):
            op(logits, ids - V)


def test_wrong_arguments_are_refused() -> None:
    logits = torch.zeros(2, 4)
    with pytest.raises(DsparkError, match="float32 table"):
        ops.shape_probs(logits.half(), *params(CASES[:2]))
    with pytest.raises(DsparkError, match="per row"):
        ops.shape_probs(logits, *params(CASES[:3]))
