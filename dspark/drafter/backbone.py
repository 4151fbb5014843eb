"""The draft layers: Qwen3-style decoder layers whose keys and values are the context features, then the block itself.

Pre-norm attention and SwiGLU, by option each between two convolutions along the block (convolution.py). Queries come
from the block only; context features enter through the same key and value maps as the block's normalised states, are
not passed through a layer's input norm and not updated by layers, so their keys and values are computed once per token
and cached by the caller.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark import ops
from dspark.drafter.attention import Spans, attend
from dspark.drafter.config import DrafterConfig
from dspark.drafter.convolution import convolution
from dspark.drafter.layers import Dense, RMSNorm
from dspark.drafter.rope import rotate

Rotary = tuple[Tensor, Tensor]  # cos, sin [..., D/2] fp32


class DraftAttention(nn.Module):
    """q/k/v/o maps with optional per-head norms and biases."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = size
        self.q_proj = Dense(hidden, config.num_heads * size, bias)
        self.k_proj = Dense(hidden, config.num_kv_heads * size, bias)
        self.v_proj = Dense(hidden, config.num_kv_heads * size, bias)
        self.o_proj = Dense(config.num_heads * size, hidden, config.attention_out_bias)
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """x [..., H] -> k (normed, rotated), v [..., Hkv, D]."""
        k, v = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        return self._place(k, self.k_norm, rotary), v

    def forward(
        self, x: Tensor, rotary: Rotary, context: tuple[Tensor, Tensor], spans: Spans, asking: int = 0
    ) -> Tensor:
        """x [B,K,H] (normed), context k, v [T,Hkv,D] -> [B,K,H] (asking > 0: of the last so many slots)."""
        cos, sin = rotary
        q = self._place(self._heads(self.q_proj(x[:, -asking:])), self.q_norm, (cos[:, -asking:], sin[:, -asking:]))
        out = attend(q, *self.keys_values(x, rotary), context, spans, self.training)
        return self.o_proj(out.flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (x.shape[-1] // self.head_dim, self.head_dim))

    def _place(self, x: Tensor, norm: RMSNorm | None, rotary: Rotary) -> Tensor:
        x = x if norm is None else norm(x)
        if self.training:
            return rotate(x, *rotary)
        cos, sin = (t.reshape(-1, t.shape[-1]).contiguous() for t in rotary)
        return ops.rotary(x.reshape(-1, *x.shape[-2:]).contiguous(), cos, sin).view(x.shape)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj, self.up_proj = Dense(hidden, inner, bias), Dense(hidden, inner, bias)
        self.down_proj = Dense(inner, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.training:
            return self.down_proj(F.silu(gate) * up)
        both = torch.cat([gate, up], dim=-1).view(-1, 2 * gate.shape[-1])
        return self.down_proj(ops.silu_mul(both).view(gate.shape))


class DraftLayer(nn.Module):
    """One pre-norm decoder layer over the block."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)
        self.before_attention, self.after_attention = convolution(config), convolution(config)
        self.before_mlp, self.after_mlp = convolution(config), convolution(config)

    def keys_values(self, states: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Context features [N,H] (normed) -> this layer's k, v [N,Hkv,D]."""
        return self.self_attn.keys_values(states, rotary)

    def forward(
        self, x: Tensor, rotary: Rotary, context: tuple[Tensor, Tensor], spans: Spans, asking: int = 0
    ) -> Tensor:
        """x [B,K,H] -> [B,K,H]. asking: only the last so many slots are computed, the others are but keys (0 = all)."""
        normed = self.before_attention(self.input_layernorm(x))
        x = x[:, -asking:] + self.after_attention(self.self_attn(normed, rotary, context, spans, asking))
        return x + self.after_mlp(self.mlp(self.before_mlp(self.post_attention_layernorm(x))))
