"""Who sees what: both arithmetic paths against a brute-force softmax over an explicit list of visible keys."""

from __future__ import annotations

import math

import pytest
import torch

from dspark.drafter.attention import Spans, attend

BLOCKS, SLOTS, HEADS, KV_HEADS, SIZE, ROWS = 7, 3, 4, 2, 8, 40
#                   two sequences (rows 5.. and 20..), unsorted, one block without context
BEGIN = torch.tensor([20, 5, 5, 20, 20, 5, 20])
END = torch.tensor([33, 5, 14, 21, 40, 9, 20])


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(BLOCKS, SLOTS, h, SIZE, generator=generator) for h in heads)
    context = [torch.randn(ROWS, KV_HEADS, SIZE, generator=generator) for _ in range(2)]
    return q, k, v, *context


def brute_force(q, k, v, ctx_k, ctx_v, window):
    out = torch.empty_like(q)
    for b in range(BLOCKS):
        low = max(int(BEGIN[b]), int(END[b]) - window) if window else int(BEGIN[b])
        keys = torch.cat([ctx_k[low : END[b]], k[b]]).repeat_interleave(HEADS // KV_HEADS, dim=1)
        values = torch.cat([ctx_v[low : END[b]], v[b]]).repeat_interleave(HEADS // KV_HEADS, dim=1)
        scores = torch.einsum("khd,thd->hkt", q[b], keys) / math.sqrt(SIZE)
        out[b] = torch.einsum("hkt,thd->khd", scores.softmax(-1), values)
    return out


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("window", [0, 1, 4, 100])
def test_equals_brute_force(training, window):
    q, k, v, *context = inputs()
    got = attend(q, k, v, tuple(context), Spans(BEGIN, END, window), training)
    torch.testing.assert_close(got, brute_force(q, k, v, *context, window), rtol=0, atol=2e-6)


@pytest.mark.parametrize("training", [True, False])
def test_unseen_rows_may_hold_anything(training):
    q, k, v, *context = inputs()
    expected = attend(q, k, v, tuple(context), Spans(BEGIN, END, 6), training)
    seen = torch.zeros(ROWS, dtype=torch.bool)
    for low, high in zip(torch.maximum(BEGIN, END - 6).tolist(), END.tolist(), strict=True):
        seen[low:high] = True
    assert not bool(seen.all())
    poisoned = tuple(torch.where(seen[:, None, None], c, float("nan") if not training else 1e4) for c in context)
    assert torch.equal(attend(q, k, v, poisoned, Spans(BEGIN, END, 6), training), expected)


def test_order_of_blocks_does_not_matter_in_training():
    q, k, v, *context = inputs()
    order = torch.argsort(BEGIN, stable=True)
    whole = attend(q, k, v, tuple(context), Spans(BEGIN, END), True)
    sorted_ = attend(q[order], k[order], v[order], tuple(context), Spans(BEGIN[order], END[order]), True)
    assert torch.equal(whole[order], sorted_)


def test_gradients_reach_only_visible_keys():
    q, k, v, *context = (t.requires_grad_() for t in inputs())
    attend(q, k, v, tuple(context), Spans(BEGIN, END), True).sum().backward()
    touched = context[1].grad.abs().sum((1, 2)) > 0
    assert touched[5:14].all()
    assert touched[20:40].all()
    assert not touched[:5].any()
    assert not touched[14:20].any()
