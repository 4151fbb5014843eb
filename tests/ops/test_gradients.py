"""Gradients: formulas against finite differences in fp64, fp32 against fp64, a forward that recording leaves alone."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dspark import ops
from dspark.contracts import DsparkError

BEGIN = torch.tensor([0, 0, 0, 2, 3, 4])
END = torch.tensor([1, 2, 3, 5, 4, 4])  # a window, and a query without any key
BEGIN2, END2 = torch.tensor([0, 0, 1, 1, 1, 3]), torch.tensor([3, 3, 3, 2, 1, 3])
IDS = torch.tensor([1, 0, 6])
KEPT = torch.tensor([4, 5, 3])  # inside the support of the rows below
HEAT, TOP_K = torch.tensor([0.7, 1.0, 2.0]), torch.tensor([0, 4, 0])
TOP_P, MIN_P = torch.tensor([1.0, 1.0, 0.6]), torch.tensor([0.0, 0.0, 0.01])
COS, SIN = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))

Case = tuple[Callable[..., Tensor | tuple[Tensor, ...]], list[tuple[int, ...]]]
CASES: dict[str, Case] = {
    "linear": (ops.linear, [(5, 7), (3, 7)]),
    "linear with bias": (ops.linear, [(5, 7), (3, 7), (3,)]),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-5), [(4, 6), (6,)]),
    "rms_norm of heads": (lambda x, w: ops.rms_norm(x[:, 1:], w, 1e-5), [(4, 3, 6), (6,)]),
    "add_rms_norm": (lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-5), [(4, 6), (4, 6), (6,)]),
    "rotary": (lambda x: ops.rotary(x[:, :2], COS, SIN), [(6, 3, 8)]),
    "silu_mul": (ops.silu_mul, [(3, 10)]),
    "attention": (lambda q, k, v: ops.attention(q, k, v, BEGIN, END, 0.4), [(6, 4, 3), (5, 2, 3), (5, 2, 3)]),
    "attention, two ranges": (
        lambda q, k, v, k2, v2: ops.attention(q, k, v, BEGIN, END, 0.4, k2, v2, BEGIN2, END2),
        [(6, 4, 3), (5, 2, 3), (5, 2, 3), (3, 2, 3), (3, 2, 3)],
    ),
    "log_softmax": (ops.log_softmax, [(3, 7)]),
    "raw_logprob": (lambda x: ops.raw_logprob(x, IDS), [(3, 7)]),
    "shape_probs": (lambda x: ops.shape_probs(x, HEAT, TOP_K, TOP_P, MIN_P), [(3, 7)]),
    "law_logprob": (lambda x: ops.law_logprob(x, KEPT, HEAT, TOP_K, TOP_P, MIN_P), [(3, 7)]),
    "log_of": (lambda x: ops.log_of(x.abs() + 0.1, IDS), [(3, 7)]),
}
LOGITS = {"log_softmax", "raw_logprob", "shape_probs", "law_logprob", "log_of"}  # fp32 only
every = pytest.mark.parametrize("name", CASES)


def inputs(name: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(name))
    shapes = CASES[name][1]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def outputs(name: str, given: list[Tensor]) -> tuple[Tensor, ...]:
    out = CASES[name][0](*given)
    return out if isinstance(out, tuple) else (out,)


@every
def test_formula_against_finite_differences(name: str) -> None:
    assert torch.autograd.gradcheck(CASES[name][0], inputs(name, torch.float64))


WITH_DTYPE = [(name, torch.float32) for name in CASES] + [
    (name, torch.bfloat16) for name in CASES if name not in LOGITS
]


@pytest.mark.parametrize(("name", "dtype"), WITH_DTYPE, ids=str)
def test_recording_leaves_the_forward_alone_and_gradients_agree_with_fp64(name: str, dtype: torch.dtype) -> None:
    given = inputs(name, dtype)
    with torch.no_grad():
        plain = outputs(name, given)
    recorded = outputs(name, given)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert all(r.requires_grad for r in recorded)
    weights = [torch.randn(r.shape, generator=torch.Generator().manual_seed(3)) for r in recorded]
    wide = [x.detach().double().requires_grad_() for x in given]
    got, truth = (
        torch.autograd.grad([(o.to(torch.float64) * w).sum() for o, w in zip(outs, weights, strict=True)], xs)
        for outs, xs in ((recorded, given), (outputs(name, wide), wide))
    )
    tolerance = 1e-5 if dtype == torch.float32 else 0.03  # bf16: inputs of the gradient are rounded to 8 bits
    for a, b, x in zip(got, truth, given, strict=True):
        assert a.dtype == x.dtype
        assert float((a.double() - b).abs().max()) <= tolerance * float(b.abs().max().clamp_min(1.0))


def test_rows_that_nobody_attends_get_no_gradient_and_may_be_garbage() -> None:
    q, k, v = (torch.randn(2, 2, 4).requires_grad_() for _ in range(3))
    with torch.no_grad():
        k[1], v[1] = torch.nan, torch.nan
    out = ops.attention(q, k, v, torch.tensor([0, 0]), torch.tensor([1, 1]), 0.5)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert not grads[2][1].any()


def test_the_gradient_of_attention_in_steps_equals_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(90, 2, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    begin, end = torch.zeros(90, dtype=torch.int64), torch.arange(1, 91)
    whole = torch.autograd.grad(ops.attention(q, k, v, begin, end, 0.5).square().sum(), (q, k, v))
    monkeypatch.setattr(sys.modules["dspark.ops.attention"], "QUERIES", 7)  # the function hides its module's name
    parts = torch.autograd.grad(ops.attention(q, k, v, begin, end, 0.5).square().sum(), (q, k, v))
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b)


def test_a_greedy_law_does_not_move() -> None:
    logits = torch.randn(2, 5).requires_grad_()
    zero, one = torch.zeros(2), torch.ones(2)
    probs = ops.shape_probs(logits, zero, torch.zeros(2, dtype=torch.int64), one, zero)
    (gradient,) = torch.autograd.grad(probs.square().sum(), logits)
    assert not gradient.any()


def test_the_support_is_held_fixed() -> None:
    logits = torch.randn(1, 8).requires_grad_()
    law = ops.shape_probs(logits, torch.ones(1), torch.tensor([3]), torch.ones(1), torch.zeros(1))
    best = int(law.argmax())
    (gradient,) = torch.autograd.grad(ops.log_of(law, torch.tensor([best])), logits)
    assert (gradient[law == 0] == 0).all() and int((law > 0).sum()) == 3
    kept = law.detach()[law > 0]
    torch.testing.assert_close(gradient[0, best], 1 - kept.max())


def test_a_weight_is_packed_once_for_recorded_and_plain_calls() -> None:
    from dspark.ops.cpu.linear import packed

    x, weight = torch.randn(3, 8), torch.nn.Parameter(torch.randn(4, 8))
    before = packed(weight)
    ops.linear(x, weight).sum().backward()
    assert packed(weight) is before


def test_drawing_has_no_gradient() -> None:
    probs = torch.rand(2, 5).requires_grad_()
    seeds = torch.arange(2)
    with pytest.raises(DsparkError, match="no_grad"):
        ops.gumbel_argmax(probs, seeds, 0, seeds)


def test_a_laws_logprob_equals_its_two_steps_and_never_divides_by_p() -> None:
    logits = torch.tensor([[0.0, -18.0, -1.0], [0.0, 1.0, 2.0]]).requires_grad_()
    law = (torch.full((2,), 0.2), torch.tensor([0, 1]), torch.ones(2), torch.zeros(2))
    ids = torch.tensor([1, 0])  # p = e^-90, and a token that top-k 1 cuts off
    got = ops.law_logprob(logits, ids, *law)
    assert torch.equal(got, ops.log_of(ops.shape_probs(logits, *law), ids))
    assert got[0] < -80 and got[1] == -torch.inf
    (gradient,) = torch.autograd.grad(got[:1].sum(), logits)
    torch.testing.assert_close(gradient[0], (torch.tensor([0.0, 1.0, 0.0]) - (logits[0] / 0.2).softmax(-1)) / 0.2)
    assert not gradient[1].any()
    (gradient,) = torch.autograd.grad(ops.log_of(ops.shape_probs(logits, *law), ids)[1:].sum(), logits)
    assert not gradient.any(), "no gradient, and no NaN, from a token outside the support"


def test_a_second_derivative_is_an_error_and_autocast_changes_nothing() -> None:
    x, weight = torch.randn(3, 8).requires_grad_(), torch.randn(4, 8).requires_grad_()
    for loss in (ops.linear(x, weight).sum(), ops.linear(x, weight).square().sum()):
        with pytest.raises(DsparkError, match="create_graph"):
            torch.autograd.grad(loss, x, create_graph=True)
    plain = torch.autograd.grad(ops.linear(x, weight).square().sum(), (x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        cast = torch.autograd.grad(ops.linear(x, weight).square().sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))
