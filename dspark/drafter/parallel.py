"""A block whose slots are computed all at once, before any of its tokens is chosen (DSpark, DFlash).

    anchor + mask tokens, or fused inputs -> draft layers -> norm -> hidden [B,P,H]
Tokens reach a later slot only through the heads: a hidden state does not depend on them. The twin is
``mtp.SequentialBlock``.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.drafter.attention import Spans
from dspark.drafter.context import Context

if TYPE_CHECKING:
    from dspark.drafter.model import Drafter


class ParallelBlock:
    """B blocks, the first `count` predictions of each. anchor_ids, anchor_positions [B]; context rows begin:end of each
    block, begin = its sequence's first row (a sliding window is applied here)."""

    def __init__(
        self,
        parts: Drafter,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        context: Context,
        begin: Tensor,
        end: Tensor,
        count: int,
    ):
        config = parts.config
        self.parts = parts
        rotary = parts.rope(anchor_positions[:, None] + torch.arange(config.block_size, device=anchor_ids.device))
        spans = Spans(begin, end, config.sliding_window)
        x = _inputs(parts, anchor_ids, context, begin, end)
        for layer, kv in zip(parts.draft_layers, context.layers, strict=True):
            x = layer(x, rotary, kv, spans)
        skipped = config.block_size - config.num_predictions
        self.hidden = parts.norm(x[:, skipped : skipped + count])

    def known(self, previous: Tensor) -> Tensor:
        """previous [B,count]: the token before each prediction -> hidden [B,count,H], normed."""
        return self.hidden

    def step(self, slot: int, previous: Tensor) -> tuple[Tensor, Tensor]:
        """previous [B]: the token before this prediction -> hidden [B,H], base logits [B,Vd] fp32."""
        return self.hidden[:, slot], self._base[:, slot].contiguous()

    @cached_property
    def _base(self) -> Tensor:
        return self.parts.base_logits(self.hidden)


def _inputs(parts: Drafter, anchor_ids: Tensor, context: Context, begin: Tensor, end: Tensor) -> Tensor:
    """[B,K,H]: fused inputs, or the anchor's embedding and then the mask token's."""
    if parts.fusion is not None:
        return parts.fusion(context.last(begin, end), parts.embed(anchor_ids))
    shape = (anchor_ids.shape[0], parts.config.block_size)
    ids = torch.full(shape, parts.config.mask_token_id, device=anchor_ids.device)
    ids[:, 0] = anchor_ids
    return parts.embed(ids)
