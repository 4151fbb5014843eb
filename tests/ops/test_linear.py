"""linear: the value, the exact chain of FMAs, and bits that ignore everything beside the row."""

from __future__ import annotations

import gc

import pytest
import torch

from dspark import ops
from dspark.contracts import DsparkError
from dspark.ops.cpu.linear import _packed
from dspark_kernels import reference

DTYPES = (torch.float32, torch.bfloat16)
ROWS = (1, 2, 3, 5, 6, 7, 8, 9, 16, 32, 33, 100, 256)


def operands(n: int, o: int, i: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, i).to(dtype), torch.randn(o, i).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("o", "i"), [(7, 13), (16, 1), (1, 40), (33, 64), (576, 576), (100, 1536)])
def test_agrees_with_the_reference(o: int, i: int, dtype: torch.dtype) -> None:
    x, weight = operands(9, o, i, dtype)
    bias = torch.randn(o).to(dtype)
    got = ops.linear(x, weight, bias, out_dtype=torch.float32)
    torch.testing.assert_close(got, reference.linear(x, weight, bias, torch.float32), rtol=1e-5, atol=2e-4)
    rounded = ops.linear(x, weight, bias)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, got.to(dtype)), "one rounding, at the end"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("i", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 8])
def test_every_output_is_a_sum_of_chains_of_fmas(n: int, i: int, dtype: torch.dtype) -> None:
    """In every row-count path: the order of summation is the documented one, not merely a consistent one."""
    x, weight = operands(n, 21, i, dtype)
    assert torch.equal(ops.linear(x, weight, out_dtype=torch.float32), reference.linear_chain(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("o", "i"), [(7, 13), (65, 576), (576, 96)])
def test_a_rows_bits_ignore_the_other_rows(o: int, i: int, dtype: torch.dtype) -> None:
    x, weight = operands(600, o, i, dtype)
    whole = ops.linear(x, weight)
    for n in ROWS:
        for first in (0, 1, 5, 600 - n):
            assert torch.equal(ops.linear(x[first : first + n], weight), whole[first : first + n]), (n, first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 6, 50, 500])
def test_bits_ignore_the_thread_count(n: int, dtype: torch.dtype, per_thread_count) -> None:
    x, weight = operands(n, 200, 576, dtype)
    first, *others = per_thread_count(lambda: ops.linear(x, weight))
    assert all(torch.equal(first, other) for other in others)


def test_nan_and_infinity_stay_in_their_row() -> None:
    x, weight = operands(7, 20, 30, torch.float32)
    clean = ops.linear(x, weight)
    x[3, 4], x[5, 0] = torch.nan, torch.inf
    got = ops.linear(x, weight)
    assert got[3].isnan().all()
    assert not got[5].isfinite().any()
    assert torch.equal(got[[0, 1, 2, 4, 6]], clean[[0, 1, 2, 4, 6]])


def test_no_rows_and_a_batch_beyond_one_chunk() -> None:
    x, weight = operands(1000, 5, 8, torch.float32)
    assert ops.linear(x[:0], weight).shape == (0, 5)
    assert torch.equal(ops.linear(x, weight)[-3:], ops.linear(x[-3:], weight))


@pytest.mark.parametrize("optimizer", ["inplace", "adamw", "foreach", "fused", "load"])
def test_a_written_weight_is_packed_again(optimizer: str) -> None:
    x, weight = operands(2, 5, 6, torch.float32)
    weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        before = ops.linear(x, weight)
        weight.grad = torch.ones_like(weight)
        if optimizer == "inplace":
            weight.add_(1.0)
        elif optimizer == "load":
            weight.copy_(torch.randn(5, 6))
        else:
            flags = {} if optimizer == "adamw" else {optimizer: True}
            torch.optim.AdamW([weight], lr=0.5, **flags).step()
        after = ops.linear(x, weight)
        assert not torch.equal(before, after)
        assert torch.equal(after, ops.linear(x, weight.clone()))


def test_writes_behind_torchs_back() -> None:
    """A whole new weight is noticed by its samples; a few elements need forget()."""
    x, weight = operands(2, 50, 60, torch.float32)
    ops.linear(x, weight)
    weight.numpy()[:] = 1.0
    torch.testing.assert_close(ops.linear(x, weight), x.sum(1, keepdim=True).expand(2, 50).contiguous())
    before = ops.linear(x, weight)
    weight.numpy()[3, 1] = 9.0
    assert torch.equal(ops.linear(x, weight), before)
    ops.forget(weight)
    assert not torch.equal(ops.linear(x, weight), before)


def test_packed_copies_die_with_their_weight() -> None:
    x, weight = operands(2, 5, 6, torch.float32)
    ops.linear(x, weight)
    key = id(weight)
    assert key in _packed
    assert not hasattr(weight, "__dict__") or not weight.__dict__, "nothing that a checkpoint would carry"
    del weight
    gc.collect()
    assert key not in _packed


def test_inference_tensors_work() -> None:
    with torch.inference_mode():
        x, weight = operands(2, 5, 6, torch.float32)
        assert torch.equal(ops.linear(x, weight), ops.linear(x, weight))


@pytest.mark.parametrize(
    ("x", "weight", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(4, 5), r"weight \[O, I\]"),
        (torch.zeros(2, 3), torch.zeros(4, 3).bfloat16(), "of torch.float32"),
        (torch.zeros(2, 3).half(), torch.zeros(4, 3).half(), "float32 or bfloat16"),
        (torch.zeros(3, 2).T, torch.zeros(4, 3), r"contiguous\(\)"),
    ],
)
def test_wrong_arguments_are_refused(x: torch.Tensor, weight: torch.Tensor, words: str) -> None:
    with pytest.raises(DsparkError, match=words):
        ops.linear(x, weight)


def test_a_width_of_nothing() -> None:
    for n in (1, 2, 20):
        assert torch.equal(ops.linear(torch.zeros(n, 0), torch.zeros(3, 0)), torch.zeros(n, 3))
