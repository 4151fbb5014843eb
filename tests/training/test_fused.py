"""The fused losses equal their plain twin: values, gradients, memory; odd sizes, reduced vocabularies, every label."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark.training.fused import TERMS, Result, Setup, Slots, fused, reference
from dspark.training.labels import TargetLaw, target_law

SHARES = {"ce": 0.3, "soft_ce": 0.4, "l1": 0.9, "coupled": 0.7}


def make(
    count: int = 11, width: int = 6, columns: int = 13, rank: int = 3, dtype: torch.dtype = torch.float64,
    reduced: bool = True,
) -> tuple[Setup, Slots]:  # fmt: skip
    """`count` slots over `columns` of a vocabulary twice as large (or all of it), two labels outside, two weights 0."""
    draw = torch.Generator().manual_seed(count + columns)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    full = 2 * columns if reduced else columns
    ids = torch.arange(0, full, 2) if reduced else None
    law = target_law(2.0 * randn(5, full), ids)
    law = TargetLaw(law.inside.to(dtype), law.outside.to(dtype), law.argmax)
    index, labels = torch.randint(5, (count,), generator=draw), torch.randint(columns, (count,), generator=draw)
    weights = torch.rand(count, generator=draw)
    labels[1::5], weights[::4] = -1, 0.0
    phi, w2 = (randn(count, rank), randn(columns, rank)) if rank else (None, None)
    head, hidden = randn(columns, width).to(dtype), randn(count, width)
    hidden, phi, w2 = (None if x is None else x.to(dtype).requires_grad_() for x in (hidden, phi, w2))

    def say(hidden: Tensor, phi: Tensor | None) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        logits = (hidden @ head.T).to(wide)
        return logits if phi is None else logits + (phi @ w2.T).to(wide)

    slots = Slots(hidden, phi, w2, law, index, labels, weights.to(torch.float32))
    return Setup(say, head, ids, rows=4), slots


def gradients(run: Callable[..., Result], setup: Setup, slots: Slots, shares: dict[str, float]) -> list[Tensor]:
    inputs = [x for x in (slots.hidden, slots.phi, slots.w2) if x is not None]
    return list(torch.autograd.grad(3.0 * run(setup, slots, shares).loss, inputs))


def assert_same(setup: Setup, slots: Slots, shares: dict[str, float], rtol: float = 1e-10) -> None:
    ours, theirs = fused(setup, slots, shares), reference(setup, slots, shares)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=rtol, atol=rtol, check_dtype=False)
    torch.testing.assert_close(ours.acceptance.float(), theirs.acceptance.float(), rtol=0, atol=1e-6)  # softmax: fp32
    assert list(ours.values) == list(shares)
    for name in shares:
        torch.testing.assert_close(ours.values[name], theirs.values[name], rtol=rtol, atol=rtol, check_dtype=False)
        assert not ours.values[name].requires_grad
    both = (gradients(run, setup, slots, shares) for run in (fused, reference))
    for mine, other in zip(*both, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=rtol, atol=rtol * float(other.abs().max()))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("terms", [c for n in (1, 2, 4) for c in itertools.combinations(TERMS, n)], ids="+".join)
def test_equals_the_plain_twin(terms: tuple[str, ...], temperature: float) -> None:
    setup, slots = make()
    setup = replace(setup, temperature=temperature)
    assert_same(setup, slots, {name: SHARES[name] for name in terms})
    assert_same(setup, slots, {name: SHARES[name] * (name == terms[0]) for name in terms})  # others: value alone


@pytest.mark.parametrize("label", ["rejection", "coupled", "greedy"])
@pytest.mark.parametrize("reduced", [True, False])
def test_acceptance_of_every_label(label: str, reduced: bool) -> None:
    setup, slots = make(count=40, reduced=reduced)
    setup = replace(setup, label=label)
    assert_same(setup, slots, SHARES)
    alone = fused(setup, slots, {})
    assert torch.equal(alone.acceptance, fused(setup, slots, SHARES).acceptance)
    assert 0 < float(alone.acceptance.mean()) < 1


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("rows", [0, 1, 3, 10**9])
def test_odd_sizes(count: int, rank: int, rows: int) -> None:
    setup, slots = make(count=count, rank=rank)
    assert_same(replace(setup, rows=rows), slots, SHARES)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_gradcheck(temperature: float) -> None:
    setup, slots = make(count=5, width=3, columns=6, rank=2)
    setup = replace(setup, temperature=temperature)

    def loss(hidden: Tensor, phi: Tensor, w2: Tensor) -> Tensor:
        moved = replace(setup, say=lambda h, f: h @ setup.head.T + f @ w2.T)
        return fused(moved, replace(slots, hidden=hidden, phi=phi, w2=w2), SHARES).loss

    assert torch.autograd.gradcheck(loss, (slots.hidden, slots.phi, slots.w2))


def test_fp32_and_bf16_inputs() -> None:
    """fp32: rounding of sums over 500 columns, against fp64. bf16: logits are rounded to bf16 on either side, and the
    probabilities behind them are fp32, so the two differ by fp32 rounding and one bf16 rounding of the gradients."""
    setup, slots = make(count=30, width=16, columns=500, rank=8, dtype=torch.float32)
    exact_setup, exact = make(count=30, width=16, columns=500, rank=8)
    for mine, other in zip(gradients(fused, setup, slots, SHARES), gradients(reference, exact_setup, exact, SHARES),
                           strict=True):  # fmt: skip
        assert float((mine.double() - other).norm() / other.norm()) < 2e-6
    setup, slots = make(count=30, width=16, columns=500, rank=8, dtype=torch.bfloat16)
    slots = replace(slots, law=TargetLaw(slots.law.inside.float(), slots.law.outside.float(), slots.law.argmax))
    ours, theirs = fused(setup, slots, SHARES), reference(setup, slots, SHARES)
    assert ours.loss.dtype == ours.values["l1"].dtype == torch.float32
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
    for mine, other in zip(gradients(fused, setup, slots, SHARES), gradients(reference, setup, slots, SHARES),
                           strict=True):  # fmt: skip
        assert mine.dtype == torch.bfloat16
        assert float((mine.double() - other.double()).norm() / other.double().norm()) < 0.01


def test_nothing_to_judge() -> None:
    setup, slots = make(count=4)
    empty = Slots(slots.hidden[:0], slots.phi[:0], slots.w2, slots.law, slots.index[:0], slots.columns[:0],
                  slots.weights[:0])  # fmt: skip
    found = fused(setup, empty, SHARES)
    found.loss.backward()
    assert float(found.loss.detach()) == 0.0 and len(found.acceptance) == 0
    assert torch.equal(slots.w2.grad, torch.zeros_like(slots.w2))


def test_no_second_derivative_and_no_gradient_unasked() -> None:
    setup, slots = make()
    (first,) = torch.autograd.grad(fused(setup, slots, SHARES).loss, slots.hidden, create_graph=True)
    with pytest.raises(RuntimeError):
        first.sum().backward()
    with torch.no_grad():
        assert not fused(setup, slots, SHARES).loss.requires_grad
    assert torch.autograd.grad(fused(setup, slots, {"ce": 0.0}).loss, slots.hidden, allow_unused=True) == (None,)


def test_a_slot_of_weight_zero_gets_no_gradient() -> None:
    setup, slots = make()
    reached = gradients(fused, setup, slots, SHARES)[0].abs().sum(-1) > 0
    assert torch.equal(reached, slots.weights > 0)


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that torch held at once beyond what it held before, from the allocator's own record."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize(
    ("shares", "count", "columns", "rows"),
    [({"ce": 0.1, "l1": 0.9}, 1024, 8192, 0), (SHARES, 256, 2048, 16)],
    ids=["usual", "all"],
)
def test_memory(shares: dict[str, float], count: int, columns: int, rows: int) -> None:
    """With N slots and V columns the plain losses hold several [N,V] tensors at once, the fused ones a part of one."""
    setup, slots = make(count, 8, columns, 4, torch.float32, reduced=False)
    setup, whole = replace(setup, rows=rows), 4 * count * columns
    peaks = {run: peak_bytes(lambda run=run: run(setup, slots, shares).loss.backward()) for run in (fused, reference)}
    assert peaks[fused] < whole, peaks
    assert peaks[reference] > 4 * whole, peaks
