"""Input fusion: each slot starts from its own projection of what is known before the block.

    x_k = F_k [c ; norm(e)]    c: context feature of the token before the anchor, e: the anchor's embedding

A plain DFlash block starts from the anchor's embedding and copies of one mask embedding, and must learn to fetch the
target's features through attention; in a few minutes of training it does not. A sequential MTP layer (DeepSeek-V3,
arXiv:2412.19437, section 2.2) and EAGLE (arXiv:2401.15077) start from the previous hidden state and the previous token
instead; this is that start for all slots of a parallel block at once. It is also what least squares can solve
(regression.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.drafter.config import DrafterConfig
from dspark.drafter.layers import Dense, RMSNorm


class InputFusion(nn.Module):
    """One linear map for all K slots."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.embed_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.proj = Dense(2 * config.hidden_size, config.block_size * config.hidden_size)

    def forward(self, feature: Tensor, embedding: Tensor) -> Tensor:
        """feature, embedding [B,H] -> block inputs [B,K,H]."""
        joined = torch.cat([feature, self.embed_norm(embedding)], dim=-1)
        return self.proj(joined).unflatten(-1, (-1, feature.shape[-1]))
