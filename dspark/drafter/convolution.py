"""A two-tap depthwise convolution along the slots of a block, its taps read off the slot itself (DFlash 2, z-lab 2026).

    y_t = k_{t,0} * x_t + k_{t,1} * x_{t-1}     x_{-1} = 0: nothing crosses a block's edge
    k_t = W x_t + b                             two numbers per group of 16 channels

A draft layer has four: before and after its attention, and before and after its feed-forward part. They see the block
alone; the context's keys and values come from features that no convolution touched, so they are still cached.
With W = 0 and b = (1, 0) at the start, each is the identity, and a copied target layer computes what it computed.
Left out on purpose: more taps, and a state that reaches back into the context.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafter.config import CHANNEL_GROUP, DrafterConfig
from dspark.drafter.layers import Constant


class Convolution(nn.Module):
    """Multiplications and one addition, each rounded by itself: the same bits wherever a slot stands."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        groups = config.hidden_size // CHANNEL_GROUP
        self.taps = Constant(config.hidden_size, torch.cat([torch.ones(groups), torch.zeros(groups)]))

    def forward(self, x: Tensor) -> Tensor:
        """x [B,K,H] -> [B,K,H]."""
        own, before = self.taps(x).unsqueeze(-1).chunk(2, dim=-2)  # [B,K,G,1]
        grouped = x.unflatten(-1, (-1, CHANNEL_GROUP))
        previous = F.pad(grouped[:, :-1], (0, 0, 0, 0, 1, 0))
        return (own * grouped + before * previous).flatten(-2)


def convolution(config: DrafterConfig) -> nn.Module:
    """One of a layer's convolutions; without the option the identity, which has no tensors."""
    return Convolution(config) if config.convolution else nn.Identity()
