"""Log-probabilities in Triton: values to fp64, one set of bits for the three ops, rows that ignore each other."""

from __future__ import annotations

import pytest
import torch

from dspark_kernels import reference
from dspark_kernels.gpu.logsoftmax import SPLIT, log_softmax, logsumexp, raw_logprob

INF = float("inf")


@pytest.mark.parametrize("v", [1, 5, SPLIT, SPLIT + 1, 20001])
def test_against_fp64(v: int) -> None:
    """Two subtractions of fp32 numbers up to 40, and the logarithm of a sum with a relative error of 1e-6."""
    logits = 5 * torch.randn(3, v)
    logits[1] += 1000.0
    logits[2, 0] = 80.0  # peaked
    torch.testing.assert_close(log_softmax(logits), reference.log_softmax(logits), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logsumexp(logits), reference.logsumexp(logits), rtol=1e-6, atol=1e-6)


def test_one_set_of_bits() -> None:
    logits = 5 * torch.randn(4, SPLIT + 77)
    ids = torch.tensor([0, SPLIT - 1, SPLIT, SPLIT + 76])
    assert torch.equal(raw_logprob(logits, ids), log_softmax(logits).gather(1, ids[:, None])[:, 0])


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize(("n", "v"), [(32, 333), (9, SPLIT + 5)])
def test_a_row_ignores_the_others(n: int, v: int) -> None:
    """v is odd: rows out of the middle lie at no multiple of 16 bytes."""
    logits, ids = 5 * torch.randn(n, v), torch.randint(0, v, (n,))
    whole, total, picked = log_softmax(logits), logsumexp(logits), raw_logprob(logits, ids)
    alone = [slice(i, i + 1) for i in (0, 7, n - 1)]
    for rows in [*alone, *(slice(n - i, n) for i in (2, 7, 8)), torch.randperm(n)[:9], torch.randperm(n)]:
        assert torch.equal(logsumexp(logits[rows]), total[rows])
        assert torch.equal(raw_logprob(logits[rows], ids[rows]), picked[rows])
    logits[::2] = float("nan")
    order = torch.randperm(n)
    assert torch.equal(log_softmax(logits[order])[order % 2 == 1], whole[order][order % 2 == 1])


def test_entries_of_minus_infinity() -> None:
    """A whole split of -inf, rows with one finite entry, and ties of all."""
    logits = torch.full((3, 2 * SPLIT + 3), -INF)
    logits[0, SPLIT + 9] = -7.0
    logits[1, SPLIT:] = 2.5
    logits[2] = 0.125
    got = log_softmax(logits)
    assert got[0, SPLIT + 9] == 0 and torch.equal(got.isinf(), logits.isinf())
    torch.testing.assert_close(got, reference.log_softmax(logits), rtol=1e-6, atol=0)
    assert torch.equal(raw_logprob(logits, torch.tensor([0, 0, 0])), torch.stack((got[0, 0], got[1, 0], got[2, 0])))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_broken_rows_and_ids_are_nan() -> None:
    logits = torch.randn(4, 10)
    logits[0, 3], logits[1, 3], logits[2] = float("nan"), INF, -INF
    assert log_softmax(logits)[:3].isnan().any(1).all() and not log_softmax(logits)[3].isnan().any()
    assert raw_logprob(logits[3:].repeat(3, 1), torch.tensor([-1, 10, 9])).isnan().tolist() == [True, True, False]


def test_no_rows_and_wrong_arguments() -> None:
    logits = torch.randn(4, 10)
    assert log_softmax(logits[:0]).shape == (0, 10)
    assert raw_logprob(logits[:0], torch.zeros(0, dtype=torch.int64)).shape == (0,)
    for wrong in (logits[0], logits.double(), logits.T, logits[:, :0]):
        with pytest.raises(ValueError, match="log_softmax: expected"):
            log_softmax(wrong)
    with pytest.raises(ValueError, match="expected ids"):
        raw_logprob(logits, torch.zeros(3, dtype=torch.int64))
