"""Blocks of a packed batch: where the anchors are, what the slots should say, which context rows they see.

Pure index arithmetic over R sequences packed flat (offsets [R+1]). Which anchors are worth training on is decided in
training/labels.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.drafter.context import Context


@dataclass(frozen=True, slots=True)
class Blocks:
    """B blocks of P predictions. anchor_ids, anchor_positions (in the sequence), begin, end (context rows) [B] int64;
    labels [B,P]: the token at anchor + j + 1; in_sequence [B,P]: False where that lies past the sequence's end (the
    label is the last token there)."""

    anchor_ids: Tensor
    anchor_positions: Tensor
    labels: Tensor
    in_sequence: Tensor
    begin: Tensor
    end: Tensor

    def inputs(self, context: Context) -> tuple:
        """The arguments of Drafter.teacher_forced."""
        return self.anchor_ids, self.anchor_positions, self.labels, context, self.begin, self.end


def blocks_at(ids: Tensor, offsets: Tensor, sequence: Tensor, anchor_positions: Tensor, num_predictions: int) -> Blocks:
    """ids [N] packed tokens, offsets [R+1], sequence [B] (which one), anchor_positions [B] inside it -> Blocks."""
    begin, last = offsets[sequence], offsets[sequence + 1] - 1
    rows = begin + anchor_positions
    assert bool(((anchor_positions >= 0) & (rows <= last)).all()), "an anchor lies outside its sequence"
    wanted = rows[:, None] + 1 + torch.arange(num_predictions, device=ids.device)
    clamped = torch.minimum(wanted, last[:, None])
    return Blocks(ids[rows], anchor_positions, ids[clamped], wanted <= last[:, None], begin, rows)
