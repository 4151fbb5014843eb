"""Keyed draws on a GPU: the tokens and log-probabilities that the CPU kernels give."""

from __future__ import annotations

import pytest
import torch

from dspark import ops
from dspark_kernels.gpu.draw import gumbel_argmax, gumbel_argmax_reference, log_of

V = 1301  # two blocks of columns, the second one ragged


def laws(n: int) -> torch.Tensor:
    probs = (3 * torch.randn(n, V)).softmax(-1)
    probs[:, ::3] = 0.0
    probs[n // 2] = 0.0
    probs[n // 2, 1300] = 1e-41  # a support of one subnormal
    return probs


def keys(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(2**62, (n,)), torch.randint(2**31, (n,))


@pytest.mark.parametrize("reduced", [False, True], ids=["all ids", "reduced vocabulary"])
def test_equal_to_the_cpu_and_the_reference(reduced: bool) -> None:
    probs, (seeds, positions) = laws(40), keys(40)
    ids = torch.arange(V) * 3 + 1 if reduced else None
    got = gumbel_argmax(probs, seeds, 2, positions, ids)
    assert torch.equal(got, ops.gumbel_argmax(probs, seeds, 2, positions, ids))
    assert torch.equal(got, gumbel_argmax_reference(probs, seeds, 2, positions, ids))
    assert got[20] == 1300 and len(set(got.tolist())) > 20


def test_rows_alone_in_batches_and_permuted() -> None:
    probs, (seeds, positions) = laws(32), keys(32)
    whole = gumbel_argmax(probs, seeds, 0, positions)
    for n in (1, 2, 7, 8, 9):
        assert torch.equal(gumbel_argmax(probs[-n:], seeds[-n:], 0, positions[-n:]), whole[-n:])
    order = torch.randperm(32)
    assert torch.equal(gumbel_argmax(probs[order], seeds[order], 0, positions[order]), whole[order])


def test_no_support_ties_and_no_rows() -> None:
    seeds = torch.zeros(2, dtype=torch.int64)
    probs = torch.zeros(2, V)
    probs[1, [5, 9]] = 0.5
    same = torch.zeros(V, dtype=torch.int64)  # the same noise everywhere: a tie
    assert gumbel_argmax(probs, seeds, 0, seeds, same).tolist() == [-1, 5]
    probs[1, 3] = torch.nan
    assert gumbel_argmax(probs, seeds, 0, seeds)[1] == -1
    assert gumbel_argmax(probs[:0], seeds[:0], 0, seeds[:0]).shape == (0,)


def test_log_of_has_the_cpus_bits() -> None:
    probs, ids = laws(200), torch.randint(V, (200,))
    got = log_of(probs, ids)
    assert torch.equal(got, ops.log_of(probs, ids))
    assert got.isinf().any() and got.isfinite().any()
    assert log_of(probs, ids + V).isnan().all()


def test_wrong_arguments_are_refused() -> None:
    probs, seeds = torch.rand(2, 5), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"gumbel_argmax: expected seeds \[2\]"):
        gumbel_argmax(probs, seeds[:1], 0, seeds)
    with pytest.raises(ValueError, match=r"log_of: expected ids \[2\]"):
        log_of(probs, seeds.float())
