"""Norms, rotary, gated activation: values, equal bits alone and in company, slices of wider rows."""

from __future__ import annotations

import pytest
import torch

from dspark import ops
from dspark.contracts import DsparkError
from dspark_kernels import reference

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.bfloat16: {"rtol": 8e-3, "atol": 1e-5}}  # bf16: 1 ulp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", [1, 7, 13, 16, 64, 576])
def test_norms_agree_with_the_reference(h: int, dtype: torch.dtype) -> None:
    x, residual = (3 * torch.randn(5, h)).to(dtype), torch.randn(5, h).to(dtype)
    weight = torch.randn(h).to(dtype)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **TOLERANCE[dtype])
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(x + residual, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [2, 10, 24, 64, 128])
def test_rotary_agrees_with_the_reference(d: int, dtype: torch.dtype) -> None:
    x = torch.randn(6, 3, d).to(dtype)
    angle = torch.randn(6, d // 2)
    got = ops.rotary(x, angle.cos(), angle.sin())
    torch.testing.assert_close(got, reference.rotary(x, angle.cos(), angle.sin()), **TOLERANCE[dtype])
    if dtype == torch.float32:
        a, b = x.chunk(2, -1)
        c, s = angle.cos()[:, None], angle.sin()[:, None]
        assert torch.equal(got, torch.cat((a * c - b * s, b * c + a * s), -1)), "two roundings, as eager torch"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("i", [1, 7, 8, 13, 1536])
def test_silu_mul_agrees_with_the_reference(i: int, dtype: torch.dtype) -> None:
    x = (5 * torch.randn(4, 2 * i)).to(dtype)
    torch.testing.assert_close(ops.silu_mul(x), reference.silu_mul(x), **TOLERANCE[dtype])


def test_silu_mul_at_the_ends() -> None:
    gate = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0, torch.nan])
    got = ops.silu_mul(torch.cat((gate, torch.ones(6)))[None])[0]
    assert torch.equal(got[:5].abs() > 1e-30, torch.tensor([False, False, False, True, True]))
    assert torch.equal(got[3:5], gate[3:5])
    assert got[5].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_ignore_other_rows_and_threads(dtype: torch.dtype, per_thread_count) -> None:
    x, weight, angle = torch.randn(300, 576).to(dtype), torch.randn(576).to(dtype), torch.randn(300, 32)
    cos, sin = angle.cos(), angle.sin()
    calls = {
        "rms_norm": lambda s: ops.rms_norm(x[s], weight, 1e-6),
        "add_rms_norm": lambda s: ops.add_rms_norm(x[s], x.flip(0)[s], weight, 1e-6)[0],
        "rotary": lambda s: ops.rotary(x.view(300, 9, 64)[s], cos[s], sin[s]).flatten(1),
        "silu_mul": lambda s: ops.silu_mul(x[s]),
    }
    for name, call in calls.items():
        whole, *others = per_thread_count(lambda call=call: call(slice(None)))
        assert all(torch.equal(whole, other) for other in others), name
        for n in (1, 2, 7, 33, 100):
            assert torch.equal(call(slice(50, 50 + n)), whole[50 : 50 + n]), (name, n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_a_fused_projection(dtype: torch.dtype) -> None:
    qkv, angle = torch.randn(5, 6 * 16).to(dtype), torch.randn(5, 8)
    part = qkv[:, 32:64].view(5, 2, 16)
    assert not part.is_contiguous()
    cos, sin, weight = angle.cos(), angle.sin(), torch.randn(16).to(dtype)
    assert torch.equal(ops.rotary(part, cos, sin), ops.rotary(part.contiguous(), cos, sin))
    assert torch.equal(ops.rms_norm(part, weight, 1e-5), ops.rms_norm(part.contiguous(), weight, 1e-5))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(DsparkError, match=r"weight \[4\]"):
        ops.rms_norm(torch.zeros(2, 4), torch.zeros(5), 1e-5)
    with pytest.raises(DsparkError, match="cos and sin"):
        ops.rotary(torch.zeros(2, 1, 4), torch.zeros(2, 4), torch.zeros(2, 4))
    with pytest.raises(DsparkError, match="even width"):
        ops.silu_mul(torch.zeros(2, 5))
    with pytest.raises(DsparkError, match="contiguous"):
        ops.rms_norm(torch.zeros(4, 2).T, torch.zeros(4), 1e-5)
