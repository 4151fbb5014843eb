"""Which keys a block sees, and attention over them: the context before its anchor, and the block itself both ways.

Context keys of all sequences lie flat in rows [T]; block b sees rows begin[b]:end[b] of it (never the anchor's own
row or a later one) and its own K slots, of which the last Q ask: all, or in mtp.py one. Scores of the two parts are
computed apart and share one softmax; no mask is larger than [anchors of a sequence, its context].
Training: blocks are grouped by the sequence they belong to (its first row), one batched product per sequence, so no
padding is computed. Inference: one call of ops.attention, a query's bits depend on its own keys alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dspark import ops


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks first:last (in `Spans.order`) of one sequence. hidden [A,S]: True where context row low + s is unseen."""

    first: int
    last: int
    low: int
    high: int
    hidden: Tensor


class Spans:
    """Context rows of each block. begin, end [B] int64, begin = first row of its sequence; window 0 = no limit."""

    def __init__(self, begin: Tensor, end: Tensor, window: int = 0):
        self.sequence, self.end = begin, end
        self.begin = torch.maximum(begin, end - window) if window else begin

    @cached_property
    def order(self) -> Tensor | None:
        """Permutation [B] that brings blocks of a sequence together; None when they already are."""
        if bool((self.sequence[1:] >= self.sequence[:-1]).all()):
            return None
        return torch.argsort(self.sequence, stable=True)

    @cached_property
    def groups(self) -> list[Group]:
        begin, end, sequence = (self._sorted(t) for t in (self.begin, self.end, self.sequence))
        counts = torch.unique_consecutive(sequence, return_counts=True)[1].tolist()
        out, first = [], 0
        for count in counts:
            lows, highs = begin[first : first + count], end[first : first + count]
            low, high = int(lows.min()), int(highs.max())
            rows = torch.arange(low, high, device=begin.device)
            hidden = (rows < lows[:, None]) | (rows >= highs[:, None])
            out.append(Group(first, first + count, low, high, hidden))
            first += count
        return out

    def _sorted(self, x: Tensor) -> Tensor:
        return x if self.order is None else x[self.order]


def attend(q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor], spans: Spans, training: bool) -> Tensor:
    """q [B,Q,Hq,D]; k, v [B,K,Hkv,D] of the block; context k, v [T,Hkv,D] -> [B,Q,Hq,D]."""
    if q.shape[0] == 0:
        return q
    return _attend_train(q, k, v, context, spans) if training else _attend_rows(q, k, v, context, spans)


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor], spans: Spans) -> Tensor:
    (blocks, slots, heads, size), own = q.shape, k.shape[1]
    first = (torch.arange(blocks, device=q.device) * own).repeat_interleave(slots)
    out = ops.attention(
        q.reshape(-1, heads, size).contiguous(), *context,
        spans.begin.repeat_interleave(slots), spans.end.repeat_interleave(slots), 1.0 / math.sqrt(size),
        k2=k.reshape(-1, *k.shape[2:]).contiguous(), v2=v.reshape(-1, *v.shape[2:]).contiguous(),
        begin2=first, end2=first + own,
    )  # fmt: skip
    return out.view(q.shape)


def _attend_train(q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor], spans: Spans) -> Tensor:
    if spans.order is not None:
        q, k, v = q[spans.order], k[spans.order], v[spans.order]
    groups = spans.groups
    counts, cuts = [g.last - g.first for g in groups], _cuts(groups, context[0].shape[0])
    blocks = zip(q.split(counts), k.split(counts), v.split(counts), strict=True)
    rows = zip(*(part.split(cuts)[1::2] for part in context), strict=True)
    parts = [_attend_sequence(b, r, g.hidden) for b, r, g in zip(blocks, rows, groups, strict=True)]
    out = torch.cat(parts)
    return out if spans.order is None else out[torch.argsort(spans.order)]


def _cuts(groups: list[Group], rows: int) -> list[int]:
    """Sizes that cut context rows into gap, group, gap, group, ..., gap. (A split's gradient is one concatenation; a
    slice's would be a full-sized zero tensor per group.)"""
    sizes, at = [], 0
    for g in groups:
        assert g.low >= at, "context rows of two sequences overlap"
        sizes += [g.low - at, g.high - g.low]
        at = g.high
    return [*sizes, rows - at]


def _attend_sequence(block: tuple[Tensor, ...], context: tuple[Tensor, ...], hidden: Tensor) -> Tensor:
    """One sequence: block q [A,Q,Hq,D], k, v [A,K,G,D], context k, v [S,G,D] -> [A,Q,Hq,D]."""
    (q, k, v), (ctx_k, ctx_v) = block, context
    anchors, slots, heads, size = q.shape
    own, kv_heads, rows = k.shape[1], k.shape[2], ctx_k.shape[0]
    share = heads // kv_heads
    q = (q * (1.0 / math.sqrt(size))).view(anchors, slots, kv_heads, share, size).permute(2, 0, 3, 1, 4)  # [G,A,g,Q,D]
    q = q.reshape(kv_heads, anchors * share * slots, size)
    k, v = (x.permute(2, 0, 1, 3).reshape(kv_heads * anchors, own, size) for x in (k, v))
    seen = torch.bmm(q, ctx_k.permute(1, 2, 0)).view(kv_heads, anchors, share * slots, rows)
    seen = seen.masked_fill(hidden[None, :, None, :], -math.inf)
    near = torch.bmm(q.reshape(kv_heads * anchors, share * slots, size), k.transpose(1, 2))
    scores = torch.cat([seen, near.view(kv_heads, anchors, share * slots, own)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    out = torch.bmm(weights[..., :rows].reshape(*q.shape[:2], rows), ctx_v.transpose(0, 1))
    near_out = torch.bmm(weights[..., rows:].reshape(kv_heads * anchors, share * slots, own), v)
    out = out.view(kv_heads, anchors, share, slots, size) + near_out.view(kv_heads, anchors, share, slots, size)
    return out.permute(1, 3, 0, 2, 4).reshape(anchors, slots, heads, size)
