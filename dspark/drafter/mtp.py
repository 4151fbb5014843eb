"""A block whose slots are computed one after the other: the MTP modules of DeepSeek-V3 (arXiv:2412.19437, section 2.2).

Module k (1-based, one draft layer each) predicts one more token from the state of the one before it and the embedding
of the token before. With the anchor x_p at position p:

    s_k = M_k [norm(h_{k-1}) ; norm(embed(x_{p+k-1}))]      h_0: context feature of the token before the anchor, or 0
    h_k = draft layer k on s_k at position p+k-1; its keys are the context before p, then s_1 .. s_k
    hidden_k = norm(h_k), which the LM head and the other heads read

As in the paper a module sees the token before its prediction, so a draft costs one layer and one LM head per token, in
sequence. Unlike in the paper, a module's past is the target's features through its own key and value maps, as a draft
layer of DSpark sees it, not what it computed itself at all earlier positions: its own track reaches back to the block's
start only. So the cache, the rounds and the training blocks are DSpark's, and a comparison changes the draft model
alone. The final norm is one for all modules. Left out: a loss weight and a training length per depth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dspark.drafter.attention import Spans
from dspark.drafter.config import DrafterConfig
from dspark.drafter.context import Context
from dspark.drafter.layers import Dense, RMSNorm

if TYPE_CHECKING:
    from dspark.drafter.model import Drafter


class Join(nn.Module):
    """A module's input, M [norm(h) ; norm(e)]."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.state_norm, self.embed_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.proj = Dense(2 * hidden, hidden)

    def forward(self, state: Tensor, embedding: Tensor) -> Tensor:
        """state, embedding [B,H] -> [B,H]."""
        return self.proj(torch.cat([self.state_norm(state), self.embed_norm(embedding)], dim=-1))


def joins(config: DrafterConfig) -> nn.ModuleList | None:
    """One per predicted token; None where the block is not sequential."""
    return nn.ModuleList(Join(config) for _ in range(config.num_layers)) if config.architecture == "mtp" else None


class SequentialBlock:
    """B blocks, walked from slot 0 on. anchor_positions [B]; context rows begin:end of each block, begin = its
    sequence's first row (a sliding window is applied here). step is given the anchors themselves for slot 0."""

    def __init__(
        self,
        parts: Drafter,
        joins: nn.ModuleList,
        anchor_positions: Tensor,
        context: Context,
        begin: Tensor,
        end: Tensor,
    ):
        config = parts.config
        self.parts, self.joins, self.context = parts, joins, context
        positions = anchor_positions[:, None] + torch.arange(config.block_size, device=anchor_positions.device)
        self.cos, self.sin = parts.rope(positions)
        self.spans = Spans(begin, end, config.sliding_window)
        self.state = context.last(begin, end)
        self.inputs = self.state.new_empty(len(begin), 0, config.hidden_size)

    def known(self, previous: Tensor) -> Tensor:
        """previous [B,g]: the token before each of the first g predictions -> hidden [B,g,H], normed."""
        return torch.stack([self._advance(slot, ids) for slot, ids in enumerate(previous.unbind(1))], dim=1)

    def step(self, slot: int, previous: Tensor) -> tuple[Tensor, Tensor]:
        """previous [B]: the token before this prediction -> hidden [B,H], base logits [B,Vd] fp32."""
        hidden = self._advance(slot, previous)
        return hidden, self.parts.base_logits(hidden)

    def _advance(self, slot: int, previous: Tensor) -> Tensor:
        assert slot == self.inputs.shape[1], "slots of a sequential block are walked in order"
        parts, upto = self.parts, slot + 1
        fresh = self.joins[slot](self.state, parts.embed(previous))
        self.inputs = torch.cat([self.inputs, fresh[:, None]], dim=1)
        rotary, kv = (self.cos[:, :upto], self.sin[:, :upto]), self.context.layers[slot]
        self.state = parts.draft_layers[slot](self.inputs, rotary, kv, self.spans, asking=1)[:, 0]
        return parts.norm(self.state)
